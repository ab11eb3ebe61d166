"""Views of a larger allocation in host memory, each with its own bytes only.

A piece of an array is a view: it holds all memory of the array that it was cut from. If it came
back as such, a task that joins small pieces of many arrays would need the memory of all of them.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import numpy as np

from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.parcel import Parts, pack, unpack
from dask_devctx.transfer.page_locked import HostBlock
from dask_devctx.worker.memory.host_form import HostForm, Take
from dask_devctx.worker.memory.types import as_view

# One view that is larger than this part of its allocation leaves with all of it.
_LARGE: Final = 0.5
# NumPy may try so often to find an element that two views share.
_ATTEMPTS: Final[Any] = 10_000  # some of NumPy's stubs allow two values only
_MOST: Final = 256


class _Piece(NamedTuple):
    """A view as it will be: dense, at the start of its own memory."""

    part: Part
    shape: Any
    dtype: Any
    strides: Any


def apart(form: HostForm, take: Take, *, unshared: bool = False) -> list[HostForm] | None:
    """Return a host form for each value of one, with the value's own bytes only.

    Parameters
    ----------
    form
        The host form of arrays with one part.
    take
        Returns host memory.
    unshared
        Whether also arrays that share elements are taken apart; then they share none afterwards.

    Returns
    -------
    list of HostForm or None
        None if the values stay together, or if there is nothing to save.
    """
    ((description, block),) = form.parts
    views = unpack(form.pickled, form.buffers, [_Contents(block)])
    if len(views) == 1:
        together = views[0].nbytes > block.nbytes * _LARGE
    elif unshared:
        together = False
    else:
        nbytes = sum(view.nbytes for view in views)
        together = len(views) > _MOST or nbytes > block.nbytes or _share_elements(views)
    return None if together else [_alone(view, description, form, take) for view in views]


class _Contents:
    """Takes the place of an allocation while views of it are unpickled as views of its bytes."""

    def __init__(self, block: HostBlock) -> None:
        self._contents = block.contents

    def _view(self, offset: int, shape: Any, dtype: Any, strides: Any) -> Any:
        return np.ndarray(shape, dtype, self._contents, offset, strides)


def _share_elements(views: Any) -> bool:
    try:
        return any(
            np.shares_memory(one, other, _ATTEMPTS)
            for one, other in itertools.combinations(views, 2)
        )
    except np.exceptions.TooHardError:
        return True


def _alone(view: Any, description: Any, form: HostForm, take: Take) -> HostForm:
    kind, nbytes, detail = description
    ((_, block),) = form.parts
    if view.nbytes != nbytes or not view.flags.c_contiguous:
        block = take(view.nbytes)
        dense = np.ndarray(view.shape, view.dtype, block.contents)
        dense[...] = view
        view = dense
    part = Part(block.address, block.nbytes, kind, detail, block, on_host=True)
    parcel = pack((_Piece(part, view.shape, view.dtype, view.strides),), _find)
    return HostForm(parcel.pickled, parcel.buffers, [(part.description, block)], form.home)


def _find(kind: type) -> Any:
    return _reduced if kind is _Piece else None


def _reduced(piece: _Piece, parts: Parts) -> Any:
    function = as_view[piece.part.kind]
    return function, (parts.add(piece.part), 0, piece.shape, piece.dtype, piece.strides)
