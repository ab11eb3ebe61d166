"""Numba: a context's memory manager is chosen when Numba first uses the context."""
