"""CuPy: its allocator belongs to the process."""

from cupy import cuda as cuda


class ndarray:
    """dask.array makes this class known when it is imported."""
