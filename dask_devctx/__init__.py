"""Run dask tasks, and anything else, on the GPU that they were assigned."""

from dask_devctx.device import Device, devices

__all__ = ["Device", "devices"]
