"""dask's P2P rechunk: runs of it in which a worker keeps blocks on their devices."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import product
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

from distributed import Status, Worker
from distributed.protocol import to_serialize
from distributed.shuffle import _rechunk
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin
from distributed.utils_comm import retry

from dask_devctx.dask_internals.connections import data_of
from dask_devctx.dask_internals.worker import wrapped_handler

Index = tuple[int, ...]
# Blocks of the output, each with a bit for each block that it is made of.
Asked = tuple[tuple[Index, bytes], ...]
_PIECES: Final = "devctx-pieces"  # begins the key of pieces that a worker asks another for


class Held(NamedTuple):
    """A block that a worker keeps: the worker's address, and the block's library, type, shape."""

    address: str
    library: str
    dtype: Any
    shape: tuple[int, ...]


class Keeper(Protocol):
    """Keeps the blocks of a worker for its runs."""

    def keep(self, run: DeviceRechunk, index: Index, block: Any) -> Held | None:
        """Keep a block in the run, and tell about it; None for a block in host memory."""

    def output(self, run: DeviceRechunk, index: Index, held: Sequence[Held]) -> Any:
        """Return a block of the output, from the blocks that it is made of, in their order."""

    def pieces(self, run: DeviceRechunk, asked: Asked) -> Any:
        """Return this worker's pieces of blocks of the output as one value; on any thread."""


class DeviceRechunk(_rechunk.ArrayRechunkRun):  # type: ignore[misc]
    """dask's run of a rechunk on one worker.

    When all blocks are there, the workers tell each other what they keep. A task that makes a block
    of the output asks them for their pieces of it. Such tasks need not wait for the event loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks: dict[Index, Any] = {}  # what this worker keeps
        self.held: dict[Index, Held] = {}  # by all workers
        # Of blocks of the output: pieces that other workers were asked for and those on their way
        # here, by the worker, and what was computed.
        self.asked: set[tuple[Index, str]] = set()
        self.coming: dict[tuple[Index, str], Any] = {}
        self.plans: dict[Index, Any] = {}
        self.lock = threading.Lock()
        _newest[self.local_address, self.id] = self

    @cached_property
    def _axes(self) -> Any:
        from dask.array.rechunk import old_to_new  # which needs NumPy

        return old_to_new(self.old, self.new)

    def parts(self, index: Index) -> list[list[tuple[int, slice]]]:
        """Return, by axis, the blocks that make a block of the output, and a slice of each."""
        return [axis[at] for axis, at in zip(self._axes, index, strict=True)]

    def sources(self, index: Index) -> list[Index]:
        """Return the blocks that make a block of the output."""
        return [*product(*([block for block, _ in axis] for axis in self.parts(index)))]

    def add_partition(self, data: Any, partition_id: Index) -> int:
        keeper = _keepers.get(self.local_address)
        self.raise_if_closed()
        held = None if keeper is None else keeper.keep(self, partition_id, data)
        if held is None:
            return int(super().add_partition(data, partition_id))
        self.held[partition_id] = held
        if self.closed:
            self.blocks = {}
            self.raise_if_closed()
        return int(self.run_id)

    async def inputs_done(self) -> None:
        await super().inputs_done()
        # dask's messages have numbers and bytes.
        said = [
            (index, pickle.dumps(held))
            for index, held in self.held.items()
            if held.address == self.local_address
        ]
        others = self.partitions_of.keys() - {self.local_address} if said else ()
        for answer in await asyncio.gather(*(self.send(address, said) for address in others)):
            if answer["status"] == "error":
                raise P2PConsistencyError(f"a worker of {self} does not take part any more")

    async def _receive(self, data: list[tuple[Index, Any]]) -> None:
        self.raise_if_closed()
        self.held |= {at: pickle.loads(said) for at, said in data if isinstance(said, bytes)}
        await super()._receive([one for one in data if not isinstance(one[1], bytes)])

    def get_output_partition(self, partition_id: Index, key: Any, **kwargs: Any) -> Any:
        keeper = _keepers.get(self.local_address)
        self.raise_if_closed()
        found = [self.held.get(block) for block in self.sources(partition_id)]
        held = [one for one in found if one is not None]
        elsewhere = self.worker_for[partition_id] != self.local_address
        if not held or keeper is None or elsewhere or not self.transferred:
            return super().get_output_partition(partition_id, key, **kwargs)
        if len({(one and one[1:3]) for one in found}) > 1:
            raise TypeError(
                "dask's P2P rechunk cannot join arrays on devices with arrays of another library "
                "or type, or in host memory: " + ", ".join({str(one and one[1:3]) for one in found})
            )
        return keeper.output(self, partition_id, held)

    async def fetched(self, worker: Worker, address: str, asked: Asked) -> Any:
        """Return another worker's pieces of blocks of the output."""
        key = (_PIECES, self.id, self.run_id, asked)

        async def ask() -> Mapping[Hashable, Any]:
            self.raise_if_closed()
            return await data_of(worker, address, [key], worker.address)

        delays = self.RETRY_DELAY_MIN, self.RETRY_DELAY_MAX
        found = await retry(ask, self.RETRY_COUNT, *delays)
        if key not in found:
            raise P2PConsistencyError(f"{address} keeps no blocks for {self} any more")
        return found[key]

    async def close(self) -> None:
        self.blocks, self.coming = {}, {}
        await super().close()
        self.blocks, self.coming = {}, {}  # of a task that came meanwhile


_newest: WeakValueDictionary[tuple[str, str], DeviceRechunk] = WeakValueDictionary()
_keepers: dict[str, Keeper] = {}


def _open_run(address: str, shuffle: str, number: int | None = None) -> DeviceRechunk | None:
    """Return a worker's run of a rechunk, of this number; None if it is to be asked for."""
    run = _newest.get((address, shuffle))
    if run is None or run.closed or run._exception or number not in (None, run.run_id):
        return None
    return run


def _get_or_create_shuffle(plugin: Any, shuffle_id: str) -> Any:
    run = _open_run(plugin.worker.address, shuffle_id)
    return run or _get_or_create(plugin, shuffle_id)


def _get_shuffle_run(plugin: Any, shuffle_id: str, run_id: int) -> Any:
    run = _open_run(plugin.worker.address, shuffle_id, run_id)
    return run or _get_run(plugin, shuffle_id, run_id)


_get_or_create = ShuffleWorkerPlugin.get_or_create_shuffle
_get_run = ShuffleWorkerPlugin.get_shuffle_run
_REPLACED: Final = (
    (_rechunk, "ArrayRechunkRun", DeviceRechunk, _rechunk.ArrayRechunkRun),
    (ShuffleWorkerPlugin, "get_or_create_shuffle", _get_or_create_shuffle, _get_or_create),
    (ShuffleWorkerPlugin, "get_shuffle_run", _get_shuffle_run, _get_run),
)


@contextmanager
def rechunking(worker: Worker, keeper: Keeper) -> Iterator[None]:
    """While it is open, a worker's P2P rechunks keep blocks on devices there."""
    address = worker.address

    def wrap(get_data: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(comm: Any, keys: Any, who: Any = None, serializers: Any = None) -> Any:
            key = next(iter(keys)) if len(keys) == 1 else None
            if not isinstance(key, tuple) or key[:1] != (_PIECES,):
                return await get_data(comm, keys=keys, who=who, serializers=serializers)
            _, shuffle, number, asked = key
            data = {}
            if (run := _open_run(address, shuffle, number)) is not None:
                found = await run.offload(keeper.pieces, run, asked)
                data[key] = to_serialize(found)
                del found
            await comm.write({"status": "OK", "data": data}, serializers=serializers)
            if (said := await comm.read(deserializers=serializers)) != "OK":
                raise ValueError(f"{who} said {said!r} in place of OK")
            return Status.dont_reply

        return answer

    _keepers[address] = keeper
    for owner, name, ours, _ in _REPLACED:
        setattr(owner, name, ours)
    try:
        with wrapped_handler(worker, "get_data", wrap):
            yield
    finally:
        if _keepers.get(address) is keeper:
            del _keepers[address]
        if not _keepers:
            for owner, name, _, theirs in _REPLACED:
                setattr(owner, name, theirs)
