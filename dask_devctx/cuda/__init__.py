"""Devices, contexts and scopes: the part of the package that needs no dask."""
