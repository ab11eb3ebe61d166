"""dask's P2P rechunk of arrays on devices: their blocks stay there until the last piece is read.

An output block is allocated once, and the pieces are copied into their places in it. Those on its
own device and those in host memory, spilled, come directly. Those on another device, or of another
worker, are packed there into one run of bytes, which travels like any other value.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distributed import Worker

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.shuffles import Asked, DeviceRechunk, Held, Index
from dask_devctx.transfer import Stamp, device_of, nbytes_by_device, to_host
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.location import memory_of
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.traffic import timing
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.host_form import HostForm
from dask_devctx.worker.values.value import AWAY, Value

if TYPE_CHECKING:
    from dask_devctx.transfer.pieces import Library, Pieces
    from dask_devctx.worker.values.store import Store

# The part of a device's memory that pieces may take which a worker is asked for at once.
_PART: Final = 256


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
        block = form.parts[0][1]
        offsets = {self.allocated: self.offset, self.nbytes: 0}
        at = offsets.get(block.nbytes)
        return None if at is None else block.address + at


class Coming(NamedTuple):
    """Pieces of a block of the output in a run of bytes that a worker was asked for."""

    future: Future[Any]
    offset: int
    shared: bool  # with other blocks of the output


class Rechunks:
    """Keeps the blocks on a worker's devices for its P2P rechunks; threads of tasks call it."""

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        store: Callable[[], Store | None],
        copies: Copies | None,
    ) -> None:
        self._worker = worker
        self._devices = devices
        self._store = store
        self._copies = copies

    def keep(self, run: DeviceRechunk, index: Index, block: Any) -> Held | None:
        """Keep a block in the run, and tell about it; None for a block in host memory."""
        device, store = device_of(block), self._store()
        if device is None:
            return None
        library = _pieces().of_type(type(block))
        if library is None or store is None:
            raise TypeError(
                f"dask's P2P rechunk cannot take a {type(block).__qualname__} on {device}. "
                "Rechunk by tasks: x.rechunk(..., method='tasks'), or "
                "dask.config.set({'array.rechunk.method': 'tasks'})"
            )
        with device:
            block = library.dense(block)
        pointer = library.pointer(block)  # raises if its bytes cannot be copied
        places = nbytes_by_device(block)
        work = Stamp.of_devices(places, places)
        value = Value((run.id, run.run_id, *index), block, places, work)
        held = Held(run.local_address, library.name, block.dtype, tuple(block.shape))
        store.spill.add(value)
        nbytes = block.dtype.itemsize * math.prod(block.shape)
        memory = memory_of(block)
        base, allocated = (memory.base, memory.nbytes) if memory is not None else (pointer, nbytes)
        run.blocks[index] = Block(held, value, nbytes, pointer - base, allocated)
        return held

    def output(self, run: DeviceRechunk, index: Index, held: Sequence[Held]) -> Any:
        """Return a block of the output, from the blocks that it is made of, in their order."""
        current = Device.current()
        with current or self._devices[0] as device:
            made = self._made(run, index, held, device)
            return to_host(made) if current is None else made

    def _made(self, run: DeviceRechunk, index: Index, held: Sequence[Held], device: Device) -> Any:
        library, shape, pieces = run.plans.pop(index, None) or _plan(run, index, held[0])
        made = self._empty(library, shape, held[0].dtype, device, pieces.nbytes)
        pointer = library.pointer(made)
        kept = _by_address(held)
        here = kept.pop(run.local_address, None)
        coming = [
            (self._asked(run, index, address, which, pieces), address, which)
            for address, which in kept.items()
            if pieces[which].nbytes
        ]
        if here is not None:
            self._gather(_blocks(run, index, here), pieces[here], library, pointer, device)
        while coming:
            one, address, which = coming.pop()
            try:
                packed, offset = one.future.result(), one.offset
            except Exception:
                if not one.shared:
                    raise
                packed, offset = self._fetched(run, address, [(index, which)]).result(), 0
            self._land(packed, pieces[which], library, pointer, device, offset)
        return made

    def _asked(
        self, run: DeviceRechunk, index: Index, address: str, which: Any, pieces: Pieces
    ) -> Coming:
        """Ask a worker for its pieces of a block of the output, and of the next ones at once."""
        with run.lock:
            if (index, address) in run.coming:
                found: Coming = run.coming.pop((index, address))
                return found
            asked, ends = [(index, which)], [0, pieces[which].nbytes]
            mine = run.partitions_of[run.local_address]
            # With several devices here, the next blocks may be made on another one.
            ahead = len(self._devices) == 1
            most = (self._devices[0].info.total_memory or 0) // _PART if ahead else 0
            for other in mine[mine.index(index) + 1 :]:
                held = [one for at in run.sources(other) if (one := run.held.get(at))]
                if ends[-1] >= most or len(held) < len(run.sources(other)):
                    break
                which = _by_address(held).get(address)
                if which is None or (other, address) in run.asked:
                    continue
                if other not in run.plans:
                    run.plans[other] = _plan(run, other, held[0])
                asked.append((other, which))
                ends.append(ends[-1] + run.plans[other][2][which].nbytes)
            future = self._fetched(run, address, asked)
            run.asked |= {(other, address) for other, _ in asked}
            for (other, _), offset in zip(asked[1:], ends[1:-1], strict=True):
                run.coming[other, address] = Coming(future, offset, shared=True)
            return Coming(future, 0, shared=len(asked) > 1)

    def _fetched(
        self, run: DeviceRechunk, address: str, asked: Sequence[tuple[Index, Any]]
    ) -> Future[Any]:
        import numpy as np

        bits = tuple((index, np.packbits(which).tobytes()) for index, which in asked)
        return asyncio.run_coroutine_threadsafe(
            run.fetched(self._worker, address, bits), self._worker.loop.asyncio_loop
        )

    def pieces(self, run: DeviceRechunk, asked: Asked) -> Any:
        """Return this worker's pieces of blocks of the output as one value; on any thread."""
        import numpy as np

        blocks: list[Block] = []
        plans = []
        for index, which in asked:
            bits = np.unpackbits(np.frombuffer(which, np.uint8)).astype(bool)
            found = _blocks(run, index, bits)
            library, _, pieces = _plan(run, index, found[0].held)
            blocks += found
            plans.append(pieces[bits[: len(pieces)]])
        homes = [next(iter(block.value.nbytes), None) for block in blocks]
        device = max(self._devices, key=homes.count)
        return self._packed(blocks, type(plans[0]).joined(plans), library, device)

    def _packed(
        self, blocks: Sequence[Block], pieces: Pieces, library: Library, device: Device
    ) -> Any:
        """Return pieces of this worker's blocks as one run of bytes on a device."""
        with device:
            packed = self._empty(library, (pieces.nbytes,), None, device, pieces.nbytes)
            self._gather(blocks, pieces.packed()[0], library, library.pointer(packed), device)
        return packed

    def _gather(
        self,
        blocks: Sequence[Block],
        pieces: Pieces,
        library: Library,
        pointer: int,
        device: Device,
    ) -> None:
        """Copy pieces of this worker's blocks to their places on the current device; waits."""
        import numpy as np

        pinned: list[Value] = []
        try:
            found = [_source(block, library, device, pinned) for block in blocks]
            homes = np.array([-1 if at is None else at.device_id for _, at, _ in found], int)
            addresses = np.array([address for address, _, _ in found], np.int64)
            on_host = homes == -1
            near = on_host | (homes == device.device_id)
            after = [value.work() for value in pinned if device in value.nbytes]
            _copy(pieces[near], addresses[near], pointer, device, on_host[near], after)
            for other in {at for _, at, _ in found if at is not None} - {device}:
                far = homes == other.device_id
                some = [blocks[i] for i in far.nonzero()[0]]
                self._land(
                    self._packed(some, pieces[far], library, other),
                    pieces[far],
                    library,
                    pointer,
                    device,
                )
        finally:
            for value in pinned:
                spill: Any = value.spill
                spill.unpin([value])

    def _land(
        self,
        packed: Any,
        pieces: Pieces,
        library: Library,
        pointer: int,
        device: Device,
        offset: int = 0,
    ) -> None:
        """Copy pieces from a run of bytes, on any device, to their places on the current one."""
        source = device_of(packed)
        if source is not None and source is not device:
            begun, start = time.time(), time.perf_counter()
            with timing() as timed:
                packed = Move(device, guard_source=False, read_only=True).run(packed)
            if self._copies is not None:
                took = time.perf_counter() - start
                self._copies.counts.copied({source: pieces.nbytes}, device, begun, took, timed)
        _copy(pieces.packed()[1], library.pointer(packed) + offset, pointer, device)

    def _empty(
        self, library: Library, shape: tuple[int, ...], dtype: Any, device: Device, nbytes: int
    ) -> Any:
        store = self._store()
        make = functools.partial(library.empty, shape, dtype, device)
        return make() if store is None else store.spill.allocated(device, nbytes, make)


def _source(
    block: Block, library: Library, device: Device, pinned: list[Value]
) -> tuple[int, Device | None, Any]:
    """Return a block's address, its device, and what keeps it; it is pinned, or in host memory."""
    value = block.value
    spill: Any = value.spill
    while (whole := spill.pin_if_here(value)) is AWAY:
        if (form := value.form) is None:  # it is restored just now
            continue
        if (address := block.in_form(form)) is not None:
            return address, None, form
        whole = spill.pin(value, device)
        break
    pinned.append(value)
    return library.pointer(whole), next(iter(value.nbytes)), whole


def _copy(
    pieces: Pieces,
    sources: Any,
    target: int,
    device: Device,
    on_host: Any = False,
    after: Iterable[Stamp] = (),
) -> None:
    """Copy pieces to their places on the current device, after some work; waits."""
    lane = lanes.take(device)
    try:
        for one in after:
            lane.after(one)
        lane.after_current_streams()  # the libraries reuse memory that earlier work still reads
        pieces.copy(lane, sources, target, on_host)
    except BaseException:
        lanes.drop(lane)
        raise
    lanes.finish(lane)


def _by_address(held: Iterable[Held | None]) -> dict[str, Any]:
    """Return which of some blocks each worker keeps."""
    import numpy as np

    addresses = np.array([one and one.address for one in held])
    return {address: addresses == address for address in dict.fromkeys(addresses.tolist())}


def _blocks(run: DeviceRechunk, index: Index, which: Any) -> list[Block]:
    """Return the chosen ones of the blocks that make a block of the output."""
    return [run.blocks[at] for at, mine in zip(run.sources(index), which, strict=False) if mine]


def _plan(run: DeviceRechunk, index: Index, held: Held) -> tuple[Library, tuple[int, ...], Pieces]:
    """Return the library of a block of the output, its shape, and its pieces."""
    import numpy as np

    pieces, axes = _pieces(), []
    for parts, old, known in zip(run.parts(index), run.old, held.shape, strict=True):
        # An axis of unknown lengths keeps its blocks: each has the length of the output's.
        sizes = [known if old[at] != old[at] else old[at] for at, _ in parts]
        cut = [part.indices(size) for size, (_, part) in zip(sizes, parts, strict=True)]
        begins, ends, _ = np.array(cut, np.int64).T
        axes.append(pieces.Axis(np.array(sizes, np.int64), begins, ends - begins))
    library = pieces.named(held.library)
    found = pieces.Pieces.between(axes, held.dtype.itemsize)
    return library, tuple(int(axis.length.sum()) for axis in axes), found


@functools.cache
def _pieces() -> Any:
    from dask_devctx.transfer import pieces  # which needs NumPy, as dask's arrays do

    def empty(shape: tuple[int, ...], dtype: Any, device: Device) -> Any:
        from dask_devctx.simulated_array import SimulatedArray

        return SimulatedArray._empty(shape, "u1" if dtype is None else dtype)

    def dense(array: Any) -> Any:
        return array if array.flags.c_contiguous else array.copy("C")

    name = "dask_devctx.SimulatedArray"
    simulated = pieces.Library(name, lambda array: array._pointer, dense, empty)
    pieces.LIBRARIES[name] = lambda: simulated
    return pieces
