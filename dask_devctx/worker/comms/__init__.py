"""Data that arrives at a worker and leaves it: its device, its order, its frames."""
