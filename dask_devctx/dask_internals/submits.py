"""A client's calls that submit tasks: what was asked for, and whether dask had the key already."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

from distributed import Client, get_worker

from dask_devctx.dask_internals.replacing import in_place

_NOT_THE_USERS: Final = frozenset({"contextlib", "dask", "dask_devctx", "distributed", "functools"})

# The client, the name of its method, and the method's arguments.
Around = Callable[[Client, str, tuple[Any, ...], Mapping[str, Any]], AbstractContextManager[Any]]


def after_each_submit(
    notice: Callable[[Client, Hashable], None],
) -> AbstractContextManager[None]:
    """While it is open, a function is called after each ``Client.submit``, with the task's key."""

    def wrap(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def submit(self: Client, func: Any, *args: Any, **kwargs: Any) -> Any:
            future = before(self, func, *args, **kwargs)
            notice(self, future.key)
            return future

        return submit

    return in_place(Client, "submit", wrap)


@contextmanager
def around_each_call(around: Around) -> Iterator[None]:
    """While it is open, each call that submits tasks is made in a context of a function."""

    def wrap(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def call(self: Client, *args: Any, **kwargs: Any) -> Any:
            with around(self, name, args, kwargs):
                return before(self, *args, **kwargs)

        return call

    with ExitStack() as steps:
        for name in ("submit", "map", "compute", "persist", "get"):
            steps.enter_context(in_place(Client, name, functools.partial(wrap, name)))
        yield


def around_each_gather(
    around: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[None]:
    """While it is open, values come to a client in a context of a function."""

    def wrap(before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        async def gather(self: Client, *args: Any, **kwargs: Any) -> Any:
            with around():
                return await before(self, *args, **kwargs)

        return gather

    return in_place(Client, "_gather_remote", wrap)


def in_a_task() -> bool:
    """Return whether a task, an actor's method or a function of ``client.run`` runs here."""
    try:
        get_worker()
    except ValueError:
        return False
    return True


def users_level() -> int:
    """Return the ``stacklevel`` with which a warning of the caller points at the user's line."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_not_the_users(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_not_the_users(module: str) -> bool:
    return module.partition(".")[0] in _NOT_THE_USERS


def is_held_elsewhere(client: Client, key: Hashable) -> bool:
    """Return whether a client has several futures of a key."""
    return bool(client.refcount[key] > 1)


def held_keys(client: Client) -> set[Hashable]:
    """Return the keys of a client's futures."""
    return set(client.futures)
