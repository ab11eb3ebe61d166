"""Where a value lives, and how it reaches another device: in order, and without the host.

:data:`device_of` and :data:`to_device` know the arrays of CuPy, torch, Numba and JAX, and the types
that users register. The module for a library is imported when a value of that library first
appears.
"""

from __future__ import annotations

import importlib
import threading

from dask_devctx.transfer.events import Stamp, hold, release_held, stamp
from dask_devctx.transfer.host import to_host
from dask_devctx.transfer.location import device_of, nbytes_by_device
from dask_devctx.transfer.move import to_device

__all__ = [
    "Stamp",
    "device_of",
    "hold",
    "nbytes_by_device",
    "release_held",
    "stamp",
    "to_device",
    "to_host",
]

# By the first part of the name of the module that defines a type.
_LIBRARIES = {
    "cupy": "cupy",
    "cupyx": "cupyx",
    "torch": "torch",
    "numba": "numba",
    "numba_cuda": "numba",
    "jax": "jax",
    "jaxlib": "jax",
    "cudf": "cudf",
}


_registered: set[str] = set()
_lock = threading.RLock()


def _register_lazily(toplevel: str, module: str) -> None:
    def register() -> None:
        with _lock:  # once for all four, so that it never replaces a user's later registration
            if module not in _registered:
                importlib.import_module(f"dask_devctx.transfer.libraries.{module}").register()
                _registered.add(module)

    for registry in (device_of, nbytes_by_device, to_device, to_host):
        registry.register_lazy(toplevel, register)


for _toplevel, _module in _LIBRARIES.items():
    _register_lazily(_toplevel, _module)
