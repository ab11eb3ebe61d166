"""A client's calls of ``submit``: what was asked for, and whether dask had the key already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Client


@contextmanager
def after_each_submit(notice: Callable[[Client, Hashable], None]) -> Iterator[None]:
    """While it is open, a function is called after each ``Client.submit``, with the task's key."""
    before = Client.submit

    @functools.wraps(before)
    def submit(self: Client, func: Any, *args: Any, **kwargs: Any) -> Any:
        future = before(self, func, *args, **kwargs)
        notice(self, future.key)
        return future

    Client.submit = submit
    try:
        yield
    finally:
        if Client.submit is submit:
            Client.submit = before


def is_held_elsewhere(client: Client, key: Hashable) -> bool:
    """Return whether a client has several futures of a key."""
    return bool(client.refcount[key] > 1)


def held_keys(client: Client) -> set[Hashable]:
    """Return the keys of a client's futures."""
    return set(client.futures)
