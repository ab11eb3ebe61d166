"""Names of dask's objects with another value for a while; a value set meanwhile by others stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(entries: MutableMapping[str, Any], name: str, value: object) -> Iterator[None]:
    """While it is open, an entry of a mapping has another value."""
    before = entries.get(name, _MISSING)
    entries[name] = value
    try:
        yield
    finally:
        if entries.get(name, _MISSING) == value:
            if before is _MISSING:
                del entries[name]
            else:
                entries[name] = before


@contextmanager
def changed(owner: Any, name: str, value: object) -> Iterator[None]:
    """While it is open, an attribute of an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if getattr(owner, name) == value:
            setattr(owner, name, before)


@contextmanager
def in_place(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """While it is open, a wrapper is in the place of an attribute of a class or an object."""
    own = vars(owner).get(name, _MISSING)
    ours = wrap(getattr(owner, name))
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
