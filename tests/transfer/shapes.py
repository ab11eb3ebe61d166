"""Plain descriptions of values, to compare a value before and after a move."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_devctx import Device
from dask_devctx.simulated_array import SimulatedArray
from dask_devctx.transfer import walk


def array(device: int, n: int = 4) -> SimulatedArray:
    """Return the first numbers, on a device."""
    with Device(device):
        return SimulatedArray.asarray(np.arange(n, dtype=float))


def shape_of(root: Any, *, devices: bool = False) -> list[Any]:
    """Return a value's types, numbers and sharing, and devices; equal for values that are alike."""
    numbers: dict[int, int] = {}
    alive, rows, stack = [], [], [root]
    while stack:
        value = stack.pop()
        protocol = walk.find(type(value))
        if protocol is None:
            rows.append((type(value).__name__, value if type(value) in (int, str) else None))
            continue
        if id(value) in numbers:
            rows.append(("again", numbers[id(value)]))
            continue
        numbers[id(value)] = len(numbers)
        alive.append(value)
        if type(value) is SimulatedArray:
            rows.append((value.get().tolist(), value.device.device_id if devices else None))
        elif protocol is walk.LEAF:
            rows.append(type(value).__name__)
        else:
            parts = parts_of(value)
            if issubclass(type(value), (set, frozenset)):  # in an order that says nothing
                parts = sorted(parts, key=lambda part: getattr(part, "rank", -1))
            rows.append((type(value).__name__, len(parts)))
            stack.extend(parts)
    return rows


def parts_of(value: Any) -> list[Any]:
    """Return an object's items and attributes; its class and its dictionary are none."""
    kind = type(value)
    own = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else None
    parts = [part for part in walk.find(kind)(value) if part is not kind]
    return [
        each
        for part in parts
        for each in (own.values() if own is not None and part is own else [part])
    ]


def identities(root: Any) -> list[int]:
    """Return which objects a value is made of."""
    found = []
    for value, parts in walk.walk(root):
        if value is not walk.LEAF:
            found.append(id(value))
        found += [id(part) for part in parts if type(part) not in (int, tuple, dict)]
    return found
