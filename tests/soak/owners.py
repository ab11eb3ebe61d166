"""Names the objects that keep arrays in device memory alive."""

from __future__ import annotations

import gc
import itertools
import sys
from types import FrameType, ModuleType
from typing import Any

from dask_devctx import SimulatedArray

DEPTH, MOST = 12, 5


def owners() -> list[str]:
    """Return, for some arrays of this process, the objects that refer to them, one by the next."""
    before = len(_arrays())
    gc.unfreeze()
    gc.collect()
    arrays = _arrays()
    mine = {id(arrays), *map(id, _frames())}
    found = [f"{before} arrays, {len(arrays)} after all garbage was collected"]
    return found + [_chain(array, set(mine)) for array in itertools.islice(arrays, MOST)]


def _arrays() -> list[SimulatedArray]:
    return [one for one in gc.get_objects() if isinstance(one, SimulatedArray)]


def _chain(array: SimulatedArray, skip: set[int]) -> str:
    one: Any = array
    words = [f"{array.nbytes} bytes"]
    skip |= {id(sys._getframe())}
    for _ in range(DEPTH):
        skip.add(id(one))
        referrers = gc.get_referrers(one)
        skip.add(id(referrers))
        owner = next((r for r in referrers if id(r) not in skip and not _passes_by(r)), None)
        if owner is None:
            break
        words.append(_told(owner, one))
        one = owner
        if isinstance(one, ModuleType):
            break
    return " < ".join(words)


def _passes_by(referrer: Any) -> bool:
    """Return whether an object belongs to this search."""
    frame = isinstance(referrer, FrameType)
    return (frame and referrer.f_code.co_filename == __file__) or type(referrer).__name__ in {
        "islice", "list_iterator", "map",
    }  # fmt: skip


def _frames() -> list[FrameType]:
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _told(owner: Any, owned: Any) -> str:
    """Return words about an object that refers to another."""
    name = f"{type(owner).__module__}.{type(owner).__qualname__}"
    if isinstance(owner, FrameType):
        code = owner.f_code
        names = [name for name, value in owner.f_locals.items() if value is owned]
        return f"frame of {code.co_qualname} ({code.co_filename}:{owner.f_lineno}) {names}"
    if isinstance(owner, dict):
        names = [str(key)[:60] for key, value in owner.items() if value is owned]
        return f"dict of {len(owner)} at {names}"
    try:
        return (
            f"{name} {str(owner)[:100]}"
            if not isinstance(owner, (list, tuple))
            else (f"{name} of {len(owner)}")
        )
    except Exception:
        return name
