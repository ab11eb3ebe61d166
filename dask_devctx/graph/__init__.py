"""Annotations that survive dask's optimization of a graph."""
