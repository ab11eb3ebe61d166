"""The table of the known libraries, and a module for each: it locates and moves their arrays.

A library's module is imported when a value of the library first appears.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from dask_devctx.transfer.location import device_of, memory_of, nbytes_by_device
from dask_devctx.transfer.move import to_device, to_host

# The module here and its function, by the first part of the name of the module that defines a type.
_LIBRARIES = {
    "cupy": "cupy.register",
    "cupyx": "cupy.register_sparse",
    "torch": "torch.register",
    "numba": "numba.register",
    "numba_cuda": "numba.register",
    "jax": "jax.register",
    "jaxlib": "jax.register",
    "cudf": "cudf.register",
}
_REGISTRIES = (device_of, nbytes_by_device, to_device, to_host, memory_of)

_registered: set[str] = set()
_lock = threading.RLock()


def known(
    kind: Any,
    *,
    nbytes: Callable[[Any], dict[Any, int]] | None = None,
    move: Callable[[Any, Any], Any] | None = None,
    host: Callable[[Any], Any] | None = None,
    memory: Callable[[Any], Any] | None = None,
) -> None:
    """Register functions for values of a type; ``nbytes`` tells where they live, too."""
    functions = (nbytes, move, host, memory)
    for registry, function in zip(_REGISTRIES[1:], functions, strict=True):
        if function is not None:
            registry.register(kind, function)


def _register_lazily(toplevel: str, path: str) -> None:
    def register() -> None:
        with _lock:  # once for all five, so that it never replaces a user's later registration
            if path not in _registered:
                module, _, function = path.partition(".")
                getattr(importlib.import_module(f"{__name__}.{module}"), function)()
                _registered.add(path)

    for registry in _REGISTRIES:
        registry.register_lazy(toplevel, register)


for _toplevel, _path in _LIBRARIES.items():
    _register_lazily(_toplevel, _path)
