"""The stack of scopes where no C extension was built; ``cuda.scope`` enters and leaves them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_devctx.driver._scope import Entry


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


_thread = _Thread()


def stack() -> list[Entry]:
    """Return the stack of the calling thread."""
    return _thread.entries


class ScopeBase:
    """The base of ``Scope``."""

    __slots__ = ("_backend", "_handle")

    _backend: Any
    _handle: int
