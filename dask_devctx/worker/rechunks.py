"""dask's P2P rechunk of arrays on devices: their blocks stay there until the last piece is read.

An output block is allocated once, and all pieces are copied into their places in it at a time.
Those on its own device and those in host memory, spilled, come directly. Those on another device,
or of another worker, are packed there into one run of bytes, which travels like any other value.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distributed import Worker

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.shuffles import DeviceRechunk, Held, Index
from dask_devctx.scheduler.messages import RECHUNK
from dask_devctx.transfer import Stamp, copy_streams, device_of, nbytes_by_device, to_host
from dask_devctx.transfer.libraries import Library, of_type
from dask_devctx.transfer.location import memory_of
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.traffic import TrafficCounts
from dask_devctx.worker.rechunk_grid import Block, Coming, Grid, Plan, cannot_join, grid_of
from dask_devctx.worker.registration import tell
from dask_devctx.worker.values.value import AWAY, Value

if TYPE_CHECKING:
    from dask_devctx.transfer.rechunk_pieces import Pieces
    from dask_devctx.worker.values.store import Store

# The part of a device's memory for the pieces that all workers are asked for at once. While these
# are used, the next are on their way.
_PART: Final = 1 / 64
# The part of these for the first message, which a task waits for.
_FIRST: Final = 1 / 16


class Arrived(NamedTuple):
    """Pieces that are packed in a run of bytes: which, the run, and where they begin in it."""

    which: Any
    packed: Any
    offset: int = 0


@dataclass(eq=False)
class Rechunks:
    """Keeps the blocks on a worker's devices for its P2P rechunks; threads of tasks call it."""

    _worker: Worker
    _devices: Sequence[Device]
    _store: Store | None
    _traffic: TrafficCounts

    def keep(self, run: DeviceRechunk, index: Index, block: Any) -> Held | None:
        """Keep a block in the run, and tell about it; None for a block in host memory."""
        device, store = device_of(block), self._store
        if device is None:
            return None
        library = of_type(type(block))
        if library is None or store is None:
            raise TypeError(
                f"dask's P2P rechunk cannot take a {type(block).__qualname__} on {device}. "
                "Rechunk by tasks: x.rechunk(..., method='tasks'), or "
                "dask.config.set({'array.rechunk.method': 'tasks'})"
            )
        with device:
            dense = library.dense(block)
        pointer = library.pointer(dense)  # raises if its bytes cannot be copied
        places, memory = nbytes_by_device(dense), memory_of(dense)
        value = store.spill.accounts.counted(memory, block) if memory is not None else None
        if value is None:
            value = Value((run.id, run.run_id, *index), dense, places, Stamp.of_devices(places))
            store.spill.add(value)
        held = Held(run.local_address, library.name, dense.dtype, tuple(dense.shape))
        nbytes = dense.dtype.itemsize * math.prod(dense.shape)
        base, allocated = (memory.base, memory.nbytes) if memory is not None else (pointer, nbytes)
        run.blocks[index] = Block(held, value, nbytes, pointer - base, allocated)
        return held

    async def lead_outputs(self, run: DeviceRechunk) -> None:
        """Have each task that makes a block of the output sent to the block's worker at once."""
        await tell(self._worker, RECHUNK, shuffle=run.id, number=run.run_id)

    def output(self, run: DeviceRechunk, index: Index) -> Any:
        """Return a block of the output; None if it is made of no blocks on devices."""
        grid = grid_of(run)
        plan = grid.plans.pop(index, None) or grid.plan(index)
        if plan is None:
            return None
        if (plan.owners < 0).any():
            raise cannot_join([grid.types[0], "host memory"])
        current = Device.current()
        if current is None and not self._devices:
            raise RuntimeError(
                f"the worker {self._worker.address} uses no device, so it can make no block of a "
                "P2P rechunk of arrays on devices. Close it, or give it devices; its log says why "
                "it has none"
            )
        with current or self._devices[0] as device:
            made = self._made(grid, index, plan, device)
            return to_host(made) if current is None else made

    def _made(self, grid: Grid, index: Index, plan: Plan, device: Device) -> Any:
        sizes = plan.pieces.sizes
        made = self._empty(plan.library, plan.shape, plan.dtype, device, int(sizes.sum()))
        coming = []
        for owner, address in enumerate(grid.addresses):
            which = plan.owners == owner
            if address != self._worker.address and sizes[which].any():
                coming.append((self._asked(grid, index, owner), owner, which))
        arrived = []
        for one, owner, which in coming:
            try:
                found = Arrived(which, one.future.result(), one.offset)
            except Exception:
                if not one.shared:
                    raise
                found = Arrived(which, self._fetched(grid, owner, (index,)).result())
            arrived.append(found._replace(packed=self._moved(found, sizes, device)))
        pointer = plan.library.pointer(made)
        self._gather(plan.blocks, plan.pieces, plan.library, pointer, device, arrived)
        return made

    def _asked(self, grid: Grid, index: Index, owner: int) -> Coming:
        """Return what a worker was asked for, and ask it for pieces of the next blocks."""
        # With several devices, the next blocks may be made on another one: none is asked for.
        total = 0 if len(self._devices) > 1 else self._devices[0].info.total_memory or 0
        enough = int(total * _PART) // len(grid.addresses)
        with grid.run.lock:
            found = grid.coming.pop((index, owner), None)
            if found is not None and found.offset:
                return found
            ahead = grid.run.outputs_to_come(self._worker) if enough else []
            if found is None:
                grid.asked.discard((index, owner))  # by a run of its task before
                self._ask(grid, owner, [index, *ahead], int(enough * _FIRST))
                found = grid.coming.pop((index, owner))
            self._ask(grid, owner, ahead, enough)
            return found

    def _ask(self, grid: Grid, owner: int, wanted: Iterable[Index], enough: int) -> None:
        """Ask a worker for its pieces of some blocks, up to so many bytes and of one at least."""
        asked: dict[Index, int] = {}  # where the pieces of each begin
        end = 0
        for index in wanted:
            if (index, owner) in grid.asked:
                continue
            grid.asked.add((index, owner))
            plan = grid.plans[index] = grid.plans.get(index) or grid.plan(index)
            nbytes = 0 if plan is None else int(plan.pieces.sizes[plan.owners == owner].sum())
            if nbytes:
                asked[index] = end
                end += nbytes
            if end >= enough:
                break
        if asked:
            future = self._fetched(grid, owner, tuple(asked))
            for index, offset in asked.items():
                grid.coming[index, owner] = Coming(future, offset, len(asked) > 1)

    def _fetched(self, grid: Grid, owner: int, asked: tuple[Index, ...]) -> Future[Any]:
        fetched = grid.run.fetched(self._worker, grid.addresses[owner], asked)
        return asyncio.run_coroutine_threadsafe(fetched, self._worker.loop.asyncio_loop)

    def pieces(self, run: DeviceRechunk, asked: Sequence[Index]) -> Any:
        """Return this worker's pieces of blocks of the output as one value; on any thread."""
        import numpy as np  # as dask's arrays need it

        from dask_devctx.transfer.rechunk_pieces import Pieces

        grid = grid_of(run)
        owner = grid.addresses.index(self._worker.address)
        plans = [plan for index in asked if (plan := grid.plan(index)) is not None]
        mine = [plan.owners == owner for plan in plans]
        parts = list(zip(plans, mine, strict=True))
        pieces = Pieces.joined([plan.pieces[which] for plan, which in parts])
        blocks = np.concatenate([plan.blocks[which] for plan, which in parts])
        homes = Counter(next(iter(block.value.nbytes), None) for (block,) in blocks)
        device = max(self._devices, key=homes.__getitem__)
        return self._packed(blocks, pieces, plans[0].library, device)

    def _packed(self, blocks: Any, pieces: Pieces, library: Library, device: Device) -> Any:
        """Return pieces of this worker's blocks as one run of bytes on a device."""
        nbytes = int(pieces.sizes.sum())
        with device:
            packed = self._empty(library, (nbytes,), None, device, nbytes)
            self._gather(blocks, pieces.packed(), library, library.pointer(packed), device, [])
        return packed

    def _gather(
        self,
        blocks: Any,
        pieces: Pieces,
        library: Library,
        pointer: int,
        device: Device,
        arrived: list[Arrived],
    ) -> None:
        """Copy pieces to their places on the current device: of blocks, and arrived; waits."""
        import numpy as np

        there = (blocks != None).nonzero()[0].tolist()  # noqa: E711
        far: dict[Device, list[int]] = {}
        for n in there:
            value = blocks[n][0].value
            home = next(iter(value.nbytes), device)
            if home is not device and not value.is_away:
                far.setdefault(home, []).append(n)
        # Nothing is pinned here while another device makes room for what is packed there.
        arrived += self._from(far, blocks, pieces, library, device)
        addresses, on_host = np.zeros(len(pieces), np.int64), np.zeros(len(pieces), bool)
        pinned: list[Value] = []
        kept = []
        moved: dict[Device, list[int]] = {}  # restored on another device just now
        try:
            for n in set(there).difference(*far.values()):
                address, home, whole = _source(blocks[n][0], library, device, pinned)
                kept.append(whole)
                addresses[n], on_host[n] = address, home is None
                if home is not None and home is not device:
                    moved.setdefault(home, []).append(n)
            arrived += self._from(moved, blocks, pieces, library, device)
            for one in arrived:
                addresses[one.which] = library.pointer(one.packed) + one.offset
            if arrived:
                pieces = pieces.unpacked([one.which for one in arrived])
            with copy_streams.taken(device) as stream:
                for value in pinned:
                    if device in value.nbytes:
                        stream.after(value.work())
                stream.after_current_streams()  # the libraries reuse memory that is still read
                pieces.copy(stream, addresses, pointer, on_host)
            copy_streams.finish(stream)
        finally:
            for value in pinned:
                value.spill.unpin([value])

    def _from(
        self,
        far: dict[Device, list[int]],
        blocks: Any,
        pieces: Pieces,
        library: Library,
        device: Device,
    ) -> Iterator[Arrived]:
        """Pack pieces on other devices of this worker, and move them to the current one."""
        for home, which in far.items():
            one = Arrived(which, self._packed(blocks[which], pieces[which], library, home))
            yield one._replace(packed=self._moved(one, pieces.sizes, device))

    def _moved(self, arrived: Arrived, sizes: Any, device: Device) -> Any:
        """Return a run of bytes on the current device."""
        packed, source = arrived.packed, device_of(arrived.packed)
        if packed.__class__ is Value:  # in host memory: this device was full
            form, spill = packed.host_form(), self._store.spill  # type: ignore[union-attr]
            return spill.allocated(device, form.nbytes, lambda: form.on_device(device))[0]
        if source is None or source is device:
            return packed
        begun = time.time()
        move = Move(device, guard_source=False, counted=True)
        packed = move.run(packed)
        nbytes = int(sizes[arrived.which].sum())
        self._traffic.copied({source: nbytes}, device, begun, move.timed)
        return packed

    def _empty(
        self, library: Library, shape: tuple[int, ...], dtype: Any, device: Device, nbytes: int
    ) -> Any:
        make, store = functools.partial(library.empty, shape, dtype, device), self._store
        return make() if store is None else store.spill.allocated(device, nbytes, make)


def _source(
    block: Block, library: Library, device: Device, pinned: list[Value]
) -> tuple[int, Device | None, Any]:
    """Return a block's address, its device, and what keeps it; it is pinned, or in host memory."""
    value = block.value
    while (whole := value.spill.pin_if_here(value)) is AWAY:
        if (form := value.form) is None:  # it is restored just now
            continue
        if (address := block.in_form(form)) is not None:
            return address, None, form
        whole = value.spill.pin(value, device)
        break
    pinned.append(value)
    return library.pointer(whole), next(iter(value.nbytes)), whole
