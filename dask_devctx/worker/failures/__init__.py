"""When things break: the right task is blamed, nothing is lost, and the worker comes back."""
