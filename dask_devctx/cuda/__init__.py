"""Devices, contexts and scopes: what needs no dask."""
