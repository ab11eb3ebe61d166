"""A warning where ``submit`` returns a task that is there already, with another device."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import dask
from distributed import Client

from dask_devctx.annotations.names import NAMES
from dask_devctx.dask_internals.submits import held_keys, is_held_elsewhere, users_level

# The annotations of ours that were given first, by key; of keys that a client holds.
_asked_for: WeakKeyDictionary[Client, dict[Hashable, dict[str, Any]]] = WeakKeyDictionary()
# Keys that are released are forgotten when so many have been added.
_FORGET_AFTER = 1000


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
