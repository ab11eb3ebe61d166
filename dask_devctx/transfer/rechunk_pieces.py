"""Pieces of arrays on devices: cut out of their blocks and put in their place in another block.

All pieces of a block are computed at a time, with NumPy. A kernel copies their rows at a pitch,
whatever library the arrays are of; the driver does where they come from host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np

from dask_devctx.driver.work import MOST
from dask_devctx.transfer.copy_streams import CopyStream

# A `CUDA_MEMCPY3D`, whose fields have 8 bytes each here, and CUDA's kinds of memory.
_OF_AN_END: Final = (
    *("x", "y", "z", "lod", "kind", "host"),
    *("address", "array", "reserved", "pitch", "rows"),
)
_FIELDS: Final = [f"{end}_{name}" for end in ("source", "target") for name in _OF_AN_END]
_BOX: Final = np.dtype([(name, np.uint64) for name in (*_FIELDS, "width", "height", "depth")])
_OF_A_RUN: Final = ["source_address", "source_host", "target_address", "width"]
# Longer rows are copied one by one: the driver takes no pitch of more than 2 GiB.
_LONGEST: Final = 2**30
_ON_HOST: Final = 1
_ON_DEVICE: Final = 2

# -- the pieces


class Axis(NamedTuple):
    """A block along an axis: the blocks that it is made of, and its part of each."""

    size: Any  # the length of each
    begin: Any  # of the part in it
    length: Any  # of the part


@dataclass(frozen=True, eq=False)
class Pieces:
    """Some pieces: for each its shape, and where it lies in its source and in its target."""

    shape: Any
    source: Any  # bytes from the source's first
    source_strides: Any
    target: Any
    target_strides: Any
    itemsize: int

    @classmethod
    def between(cls, axes: Sequence[Axis], itemsize: int) -> Pieces:
        """Return the pieces that make a block, in C order of the blocks that they come from."""
        which = np.indices([len(axis.size) for axis in axes]).reshape(len(axes), -1)
        spread = np.zeros((len(axes), 4, which.shape[1] if axes else 1), np.int64)
        whole = np.zeros((1, len(axes)), np.int64)
        for n, (axis, at) in enumerate(zip(axes, which, strict=True)):
            ends = axis.length.cumsum()
            spread[n] = np.array([*axis, ends - axis.length])[:, at]
            whole[0, n] = ends[-1]
        size, begin, shape, at = spread.transpose(1, 2, 0)
        strides = _strides(size, itemsize)
        target_strides = np.broadcast_to(_strides(whole, itemsize), shape.shape)
        source, target = (begin * strides).sum(1), (at * target_strides).sum(1)
        return cls(shape, source, strides, target, target_strides, itemsize)

    @classmethod
    def joined(cls, some: Sequence[Pieces]) -> Pieces:
        """Return the pieces of several blocks, one block's after another's."""
        return some[0]._with(lambda name: np.concatenate([getattr(one, name) for one in some]))

    def _with(self, array: Callable[[str], Any]) -> Pieces:
        names = (one.name for one in fields(self) if one.name != "itemsize")
        return replace(self, **{name: array(name) for name in names})

    def __len__(self) -> int:
        return len(self.shape)

    def __getitem__(self, which: Any) -> Pieces:
        return self._with(lambda name: getattr(self, name)[which])

    @functools.cached_property
    def sizes(self) -> Any:
        """The bytes of each."""
        return self.shape.prod(1) * self.itemsize

    def packed(self) -> Pieces:
        """Return the way of the pieces into one run of bytes."""
        at = self.sizes.cumsum() - self.sizes
        return replace(self, target=at, target_strides=_strides(self.shape, self.itemsize))

    def unpacked(self, runs: Sequence[Any]) -> Pieces:
        """Return the way of the pieces where some come from runs of bytes: which, for each run."""
        dense = _strides(self.shape, self.itemsize)
        source, strides = self.source.copy(), self.source_strides.copy()
        for which in runs:
            sizes = self.sizes[which]
            source[which], strides[which] = sizes.cumsum() - sizes, dense[which]
        return replace(self, source=source, source_strides=strides)

    def copy(self, stream: CopyStream, sources: Any, target: int, on_host: Any = False) -> None:
        """Enqueue the copies, from the addresses of the sources to that of the target."""
        some = self.sizes > 0
        if not some.any():
            return
        sources, on_host = (np.broadcast_to(each, some.shape)[some] for each in (sources, on_host))
        pieces = self if some.all() else self[some]
        boxes = pieces._boxes(np.asarray(sources, np.int64), target, on_host)
        long = boxes["width"] > _LONGEST
        for of, host, to, nbytes in boxes[long][_OF_A_RUN].tolist():
            (stream.copy_in if host else stream.copy)(to, host or of, nbytes)
        from_host = boxes[~long & (boxes["source_kind"] == _ON_HOST)]
        stream.copy_boxes(from_host.ctypes.data, len(from_host))
        here = boxes[~long & (boxes["source_kind"] == _ON_DEVICE)]
        if n := len(here):
            table = np.zeros(n + MOST, _BOX)
            table[:n] = here
            extent = int(here["width"].max()), int((here["height"] * here["depth"]).max())
            stream.copy_boxes_here(table.ctypes.data, n, extent)

    def _boxes(self, sources: Any, target: int, on_host: Any) -> Any:
        """Return the driver's description of each copy: rows of bytes, in one or more planes."""
        of, to = sources + self.source, target + self.target
        one = np.ones((len(of), 1), np.int64)
        # The innermost axis is that of the bytes.
        dims = np.concatenate([self.shape, one * self.itemsize], 1).T
        strides = [
            np.concatenate([each, one], 1).T for each in (self.source_strides, self.target_strides)
        ]
        kept = [(dims[-1], strides[0][-1], strides[1][-1])]
        for axis in zip(dims[-2::-1], strides[0][-2::-1], strides[1][-2::-1], strict=True):
            kept += _joined(axis, kept.pop())
        (width, _, _), *rest = kept
        # Each step along an outer axis is a piece of its own, and each row that is very long.
        while len(rest) > (0 if (width > _LONGEST).any() else 2):
            n, step, other = rest.pop()
            index = np.repeat(np.arange(len(n)), n)
            number = np.arange(len(index)) - np.repeat(n.cumsum() - n, n)
            of, to = of[index] + number * step[index], to[index] + number * other[index]
            width, on_host = width[index], on_host[index]
            rest = [tuple(each[index] for each in axis) for axis in rest]
        flat = np.ones_like(width), width, width
        height, *pitches = rest[0] if rest else flat
        depth, *planes = rest[1] if len(rest) > 1 else flat
        low = height == 1  # one row in each plane: the planes are the rows
        height, depth = np.where(low, depth, height), np.where(low, 1, depth)
        boxes = np.zeros(len(of), _BOX)
        for name, pitch, plane in zip(("source", "target"), pitches, planes, strict=True):
            pitch = np.where(low, plane, pitch)
            pitch = np.where(height == 1, width, pitch)
            boxes[f"{name}_pitch"] = pitch
            boxes[f"{name}_rows"] = np.where(depth == 1, height, plane // pitch)
        boxes["width"], boxes["height"], boxes["depth"] = width, height, depth
        boxes["source_kind"] = np.where(on_host, _ON_HOST, _ON_DEVICE)
        boxes["source_address"] = np.where(on_host, 0, of)
        boxes["source_host"] = np.where(on_host, of, 0)
        boxes["target_kind"], boxes["target_address"] = _ON_DEVICE, to
        return boxes


def _joined(outer: tuple[Any, ...], inner: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return two neighbouring axes as one where that is right for all pieces, the inner first."""
    (n, *steps), (m, *insides) = outer, inner
    ends = zip(steps, insides, strict=True)
    if all(((n == 1) | (step == inside * m)).all() for step, inside in ends):
        return [(n * m, *insides)]
    return [inner, outer]


def _strides(shape: Any, itemsize: int) -> Any:
    """Return the strides of dense arrays in C order, in bytes."""
    ones = np.full((len(shape), 1), itemsize, np.int64)
    return np.concatenate([ones, shape[:, :0:-1]], 1).cumprod(1)[:, ::-1][:, : shape.shape[1]]
