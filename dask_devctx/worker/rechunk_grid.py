"""The blocks of a P2P rechunk in their order, and how each block of its output is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_devctx.dask_internals.shuffles import DeviceRechunk, Held, Index
from dask_devctx.transfer.libraries import Library, named
from dask_devctx.worker.values.host_form import HostForm
from dask_devctx.worker.values.value import Value

if TYPE_CHECKING:
    from dask_devctx.transfer.rechunk_pieces import Axis, Pieces


class Block(NamedTuple):
    """A block that this worker keeps, and where it lies in its allocation on the device."""

    held: Held
    value: Value
    nbytes: int
    offset: int
    allocated: int

    def in_form(self, form: HostForm) -> int | None:
        """Return the block's address in host memory; None if the form does not have it as bytes."""
        if len(form.parts) != 1:
            return None
        # It was copied as an array of its own, or as all of its allocation.
        part = form.parts[0]
        offsets = {self.allocated: self.offset, self.nbytes: 0}
        at = offsets.get(part.nbytes)
        return None if at is None else part.pointer + at


class Coming(NamedTuple):
    """Pieces of a block of the output in a run of bytes that a worker was asked for."""

    future: Future[Any]
    offset: int
    shared: bool  # with other blocks of the output


class Plan(NamedTuple):
    """How a block of the output is made; all but its shape for each of its pieces."""

    library: Library
    dtype: Any
    shape: tuple[int, ...]
    pieces: Pieces
    owners: Any  # the numbers of the workers that keep them
    blocks: Any  # that this worker keeps; None for others


class Grid:
    """The blocks of a rechunk in their order, all of which are kept; and pieces on their way."""

    def __init__(self, run: DeviceRechunk) -> None:
        import numpy as np

        shape = tuple(map(len, run.old))
        self.run = run
        self.addresses = list(dict.fromkeys(one.address for one in run.held.values()))
        self.types = list(dict.fromkeys(one[1:3] for one in run.held.values()))
        self.owners = np.full(shape, -1)
        self.kinds = np.full(shape, -1)
        self.blocks = np.full(shape, None, object)
        for at, held in run.held.items():
            self.owners[at] = self.addresses.index(held.address)
            self.kinds[at] = self.types.index(held[1:3])
        for at, block in run.blocks.items():
            self.blocks[at] = (block,)  # NumPy would look into it
        self.plans: dict[Index, Plan | None] = {}  # of blocks that are made soon
        self.coming: dict[tuple[Index, int], Coming] = {}
        self.asked: set[tuple[Index, int]] = set()  # all that a worker was asked for
        self._axes: dict[tuple[int, int, int | None], Axis] = {}

    def plan(self, index: Index) -> Plan | None:
        """Return how a block of the output is made; None if it is made of none on devices."""
        import numpy as np

        from dask_devctx.transfer.rechunk_pieces import Pieces

        parts = [axis[at] for axis, at in zip(self.run.axes, index, strict=True)]
        where = tuple(slice(part[0][0], part[-1][0] + 1) for part in parts)
        kinds = self.kinds[where]
        told = kinds[kinds >= 0]
        if not told.size:
            return None
        if (told != told[0]).any():
            raise cannot_join(self.types[kind] for kind in np.unique(told))
        name, dtype = self.types[told[0]]
        first = np.argwhere(kinds >= 0)[0]
        known = self.run.held[tuple(part[n][0] for part, n in zip(parts, first, strict=True))].shape
        # An axis of unknown lengths keeps its blocks: each has the length of the output's.
        axes = [
            self._axis(n, at, size if self.run.old[n][0] != self.run.old[n][0] else None)
            for n, (at, size) in enumerate(zip(index, known, strict=True))
        ]
        shape = tuple(int(axis.length.sum()) for axis in axes)
        found = Pieces.between(axes, dtype.itemsize)
        owners, blocks = self.owners[where].ravel(), self.blocks[where].ravel()
        return Plan(named(name), dtype, shape, found, owners, blocks)

    def _axis(self, axis: int, at: int, known: int | None) -> Axis:
        import numpy as np

        from dask_devctx.transfer.rechunk_pieces import Axis

        if (found := self._axes.get((axis, at, known))) is not None:
            return found
        parts = self.run.axes[axis][at]
        sizes = [self.run.old[axis][n] if known is None else known for n, _ in parts]
        cut = [part.indices(size) for size, (_, part) in zip(sizes, parts, strict=True)]
        begins, ends, _ = np.array(cut, np.int64).T
        made = Axis(np.array(sizes, np.int64), begins, ends - begins)
        self._axes[axis, at, known] = made
        return made


def grid_of(run: DeviceRechunk) -> Grid:
    """Return the grid of a run, which all workers have told of their blocks."""
    with run.lock:
        grid: Grid | None = run.grid
        if grid is None:
            grid = Grid(run)
            run.raise_if_closed()
            run.grid = grid
        return grid


def cannot_join(types: Iterable[object]) -> TypeError:
    return TypeError(
        "dask's P2P rechunk cannot join arrays on devices with arrays of another library or type, "
        f"or in host memory: {', '.join(map(str, types))}"
    )
