"""The numbers and ranges of a worker's devices: counts, history, Prometheus."""
