"""What a worker tells of its devices: counts, history, Prometheus, NVTX."""
