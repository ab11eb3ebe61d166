"""Warnings at the user's line: annotations that mean nothing, and annotations as arguments."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import dask
from dask.utils import funcname
from distributed import Client

from dask_devctx.annotations.names import (
    DEVICE,
    NAMES,
    TOLD,
    item_on_each,
    mistaken,
)
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.dask_internals.graphs import layers_of
from dask_devctx.dask_internals.submits import in_a_task, users_level

_IN_A_SCOPE: Final = (
    "the scope of cuda:{0} is open, but client.{1} runs its tasks on any device: a scope is for "
    "code that runs here. Write with dask.annotate(device={0}): client.{1}(...), or "
    'device="auto" where any device is right'
)

_told: WeakKeyDictionary[Client, set[str]] = WeakKeyDictionary()


@contextmanager
def told_of_mistakes(
    client: Client, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Warn of the mistakes in a client's call that submits tasks, each once.

    Meanwhile the tasks have a mark, so that the scheduler does not warn again.
    """
    if name in ("submit", "map") and not NAMES.isdisjoint(kwargs):
        for text in _passed_on(name, args, kwargs):
            _tell(client, text)
    annotations = dask.get_annotations()
    if (scopes := open_scopes()) and NAMES.isdisjoint(annotations) and not in_a_task():
        device = getattr(getattr(scopes[-1], "device", scopes[-1]), "device_id", None)
        if device is not None and not _names_devices(name, args, kwargs):
            warnings.warn(_IN_A_SCOPE.format(device, name), stacklevel=users_level())
    found = mistaken(annotations)
    if not found:
        yield
        return
    for text in found.values():
        _tell(client, text)
    with dask.annotate(**{TOLD: sorted(found)}):
        yield


def _names_devices(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call's function, or a layer of its collections, names devices."""
    if name in ("submit", "map"):
        function = args[0] if args else kwargs.get("func")
        return bool(getattr(type(function), "carries_device", False))
    given = [*args, *kwargs.values()][:1]
    return any(not NAMES.isdisjoint(layer.annotations or ()) for layer in layers_of(given))


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
            given, called = kwargs[one], funcname(function)
            remedy = f"with dask.annotate({one}={given!r}): client.{name}(...)"
            if one == DEVICE and isinstance(given, list | tuple):
                remedy = item_on_each(called, given)
            yield (
                f"{called} takes no argument {one!r}, and client.{name} hands it on: the task "
                f"fails. {one!r} is an annotation: write {remedy}"
            )


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C may not tell
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
