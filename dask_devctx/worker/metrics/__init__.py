"""The numbers of a worker's devices: counts, history, Prometheus."""
