"""The table of the known libraries, and a module for each: it locates, moves and allocates arrays.

A library's module is imported when a value of the library first appears. CONTRIBUTING names the
other places that a new library may need.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.location import device_of, memory_of, nbytes_by_device
from dask_devctx.transfer.move import to_device, to_host

# The modules, by the first part of the name of the module that defines a type.
MODULES = {
    "cupy": f"{__name__}.cupy",
    "cupyx": f"{__name__}.cupyx",
    "torch": f"{__name__}.torch",
    "numba": f"{__name__}.numba",
    "numba_cuda": f"{__name__}.numba",
    "jax": f"{__name__}.jax",
    "jaxlib": f"{__name__}.jax",
    "cudf": f"{__name__}.cudf",
    "rmm": f"{__name__}.rmm",
}
_REGISTRIES = (device_of, nbytes_by_device, to_device, to_host, memory_of)


class Library(NamedTuple):
    """How the arrays of a library are made and read; a module has its own as ``LIBRARY``."""

    kind: type
    pointer: Callable[[Any], int]
    # The functions below are called on the array's device.
    empty: Callable[[tuple[int, ...], Any, Device], Any]  # of shape and type; bytes for None
    dense: Callable[[Any], Any] = lambda array: array  # in C order

    @property
    def name(self) -> str:
        """The first module and the own name of the arrays' type, which all processes know."""
        return f"{self.kind.__module__.partition('.')[0]}.{self.kind.__name__}"


@functools.cache
def named(library: str) -> Library:
    """Return the functions of a library by its name, or the first part of it."""
    module = importlib.import_module(MODULES[library.partition(".")[0]])
    return module.LIBRARY  # type: ignore[no-any-return]


def of_type(kind: type) -> Library | None:
    """Return the functions for a type of arrays, if it is one of a known library."""
    module = MODULES.get(kind.__module__.partition(".")[0])
    found = getattr(importlib.import_module(module), "LIBRARY", None) if module else None
    return found if found is not None and found.kind is kind else None


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


# The import registers a library with all of them, and is the only one: it never replaces a user's
# later registration.
for _toplevel, _module in MODULES.items():
    for _registry in _REGISTRIES:
        _registry.register_lazy(_toplevel, functools.partial(importlib.import_module, _module))
MODULES["dask_devctx"] = "dask_devctx.simulated_array"  # it needs NumPy, and registers itself
