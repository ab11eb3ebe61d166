"""Warnings at the user's line: annotations that mean nothing, go astray, or come too late."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
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
from dask_devctx.dask_internals.submits import (
    held_keys,
    in_a_task,
    is_held_elsewhere,
    users_level,
)

_IN_A_SCOPE: Final = (
    "the scope of cuda:{0} is open, but client.{1} runs its tasks on any device: a scope is for "
    "code that runs here. Write with dask.annotate(device={0}): client.{1}(...), or "
    'device="auto" where any device is right'
)

_told: WeakKeyDictionary[Client, set[str]] = WeakKeyDictionary()
# The annotations of ours that were given first, by key; of keys that a client holds.
_asked_for: WeakKeyDictionary[Client, dict[Hashable, dict[str, Any]]] = WeakKeyDictionary()
# Keys that are released are forgotten when so many have been added.
_FORGET_AFTER = 1000


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


def warn_of_other_device(client: Client, key: Hashable) -> None:
    """Warn if a task of this key was asked for on another device, and is there still."""
    given = dask.get_annotations()
    asked = {name: given[name] for name in sorted(NAMES & given.keys())}
    if not asked:
        return
    known = _asked_for.setdefault(client, {})
    if key not in known or not is_held_elsewhere(client, key):
        if len(known) % _FORGET_AFTER == _FORGET_AFTER - 1:
            held = held_keys(client)
            for old in known.keys() - held:
                del known[old]
        known[key] = asked
        return
    first = known[key]
    if first.keys() == asked.keys() and all(_same(first[name], asked[name]) for name in asked):
        return
    warnings.warn(
        f"{key!r} was submitted with {_shown(first)} and is there still, so dask ignores "
        f"{_shown(asked)}: it runs the same pure function with the same arguments once. To run it "
        "again, submit it with pure=False, or as on_device(...)(function)",
        stacklevel=users_level(),
    )


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _shown(annotations: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in annotations.items())
