"""Where a value lives, and how it reaches another device: in order, and without the host.

:data:`device_of` and :data:`to_device` know the arrays of the libraries in
:mod:`dask_devctx.transfer.libraries`, and the types that users register.
"""

import dask_devctx.transfer.libraries  # noqa: F401  # registers them
from dask_devctx.transfer.events import Stamp, hold, release_held, stamp
from dask_devctx.transfer.location import device_of, memory_of, nbytes_by_device
from dask_devctx.transfer.move import to_device, to_host

__all__ = [
    "Stamp",
    "device_of",
    "hold",
    "memory_of",
    "nbytes_by_device",
    "release_held",
    "stamp",
    "to_device",
    "to_host",
]
