"""A scope that makes a context, enters it, leaves it and closes it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from dask_devctx.cuda.any_context import AnyContext
from dask_devctx.cuda.scope import raise_or_note
from dask_devctx.errors import DevctxError, DeviceScopeError

C = TypeVar("C", bound=AnyContext[Any])


class Temporary(Generic[C]):
    """A scope that makes a context for each ``with``: ``Context.temporary`` returns it.

    Parameters
    ----------
    make
        A function that makes the context.
    written
        How the scope is written in code, for messages.

    Notes
    -----
    Reusable and reentrant, on any thread.
    """

    def __init__(self, make: Callable[[], C], written: str) -> None:
        self._make = make
        self._written = written
        self._thread = threading.local()

    def __enter__(self) -> C:
        with ExitStack() as stack:
            own = self._make()
            stack.push(functools.partial(_close, own))
            stack.enter_context(own)
            vars(self._thread).setdefault("open", []).append(stack.pop_all())
        return own

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        stacks: list[ExitStack] = getattr(self._thread, "open", [])
        if not stacks:
            raise DeviceScopeError(
                self._written, "was left on a thread that did not enter it; nothing was changed"
            )
        stacks.pop().__exit__(exc_type, exc, traceback)
        return False

    def __repr__(self) -> str:
        return self._written


def _close(
    context: AnyContext[Any],
    exc_type: type[BaseException] | None,
    exc: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Close a context on leaving, without hiding the body's exception."""
    try:
        context.close()
    except DevctxError as error:
        raise_or_note(error, exc)
