"""RMM's buffers, the memory of cuDF's objects."""

from __future__ import annotations

import math

import rmm

from dask_devctx.transfer.libraries import Library

LIBRARY = Library(
    rmm.DeviceBuffer,
    lambda buffer: int(buffer.ptr),
    lambda shape, dtype, device: rmm.DeviceBuffer(size=math.prod(shape)),
)
