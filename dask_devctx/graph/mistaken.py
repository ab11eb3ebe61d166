"""Warnings at the user's line: annotations that mean nothing, and annotations as arguments."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import dask
from dask.utils import funcname
from distributed import Client

from dask_devctx.annotations.names import NAMES, TOLD, mistaken
from dask_devctx.dask_internals.submits import users_level

_told: WeakKeyDictionary[Client, set[str]] = WeakKeyDictionary()


@contextmanager
def told_of_mistakes(
    client: Client, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Warn of the mistakes in a client's call that submits tasks, each once.

    Parameters
    ----------
    client
        The client.
    name
        The name of its method.
    args, kwargs
        The method's arguments.

    Notes
    -----
    Meanwhile the tasks have a mark, so that the scheduler does not warn again.
    """
    if name in ("submit", "map") and not NAMES.isdisjoint(kwargs):
        for text in _passed_on(name, args, kwargs):
            _tell(client, text)
    found = mistaken(dask.get_annotations())
    if not found:
        yield
        return
    for text in found.values():
        _tell(client, text)
    with dask.annotate(**{TOLD: sorted(found)}):
        yield


def _tell(client: Client, text: str) -> None:
    told = _told.setdefault(client, set())
    if text not in told:
        told.add(text)
        warnings.warn(text, stacklevel=users_level())


def _passed_on(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each annotation that was given as an argument of a task's function."""
    function = args[0] if args else kwargs.get("func")
    for one in sorted(NAMES & kwargs.keys()):
        if callable(function) and not _takes(function, one):
            yield (
                f"{funcname(function)} takes no argument {one!r}, and client.{name} hands it on: "
                f"the task fails. {one!r} is an annotation: write "
                f"with dask.annotate({one}={kwargs[one]!r}): client.{name}(...)"
            )


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C may not tell
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
