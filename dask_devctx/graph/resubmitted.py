"""A warning where ``submit`` returns a task that is there already, with another device."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import dask
from distributed import Client

from dask_devctx.dask_internals.submits import held_keys, is_held_elsewhere

_NONE = object()
# The device that was asked for first, by key; of keys that a client holds.
_asked_for: WeakKeyDictionary[Client, dict[Hashable, Any]] = WeakKeyDictionary()
# Keys that are released are forgotten when so many have been added.
_FORGET_AFTER = 1000


def warn_of_other_device(client: Client, key: Hashable) -> None:
    """Warn if a task of this key was asked for on another device, and is there still.

    Parameters
    ----------
    client
        The client that submitted the task just now.
    key
        The task's key. dask gives the same key to the same pure function with the same arguments.
    """
    device = dask.get_annotations().get("device", _NONE)
    if device is _NONE:
        return
    known = _asked_for.setdefault(client, {})
    if key not in known or not is_held_elsewhere(client, key):
        if len(known) % _FORGET_AFTER == _FORGET_AFTER - 1:
            held = held_keys(client)
            for old in known.keys() - held:
                del known[old]
        known[key] = device
        return
    first = known[key]
    if type(first) is type(device) and first == device:
        return
    warnings.warn(
        f"{key!r} was submitted with device={first!r} and is there still, so device={device!r} has "
        "no effect: dask runs the same pure function with the same arguments once. To run it on "
        "both devices, submit it with pure=False, or as on_device(...)(function)",
        stacklevel=4,
    )
