"""Replacement of the functions by which distributed serializes values, and of those for a type."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from dask_devctx.dask_internals.worker import replaced

# Every value that distributed packs or unpacks goes through one of these. distributed looks each
# name up in its module at each call.
_FUNCTIONS: Final = {
    "distributed.protocol.serialize": ("serialize", "deserialize"),
    "distributed.protocol.pickle": ("dumps", "loads"),
}


def register_instead(registry: Any, kind: type, serialize: Callable[..., Any]) -> None:
    """Register a function for a type, and for its subclasses that used the type's old function."""
    found = registry._lookup  # dispatching runs lazy registrations, and this may be one
    theirs = found[kind]
    for each in [each for each, known in found.items() if known is theirs]:
        registry.register(each, serialize)


@contextmanager
def wrapped_serialization(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """While it is open, each function of this process that packs or unpacks a value is wrapped.

    Parameters
    ----------
    wrap
        Given such a function, returns the wrapped one.
    """
    with ExitStack() as steps:
        for name, functions in _FUNCTIONS.items():
            module = vars(importlib.import_module(name))
            for function in functions:
                steps.enter_context(replaced(module, function, wrap(module[function])))
        yield
