"""dask's P2P rechunk: runs of it in which a worker keeps blocks on their devices."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from distributed import Scheduler, Status, Worker
from distributed.protocol import to_serialize
from distributed.shuffle import _rechunk
from distributed.shuffle._core import barrier_key, id_from_key
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin
from distributed.utils_comm import retry

from dask_devctx.dask_internals.connections import data_of
from dask_devctx.dask_internals.worker import patched, wrapped_handler

Index = tuple[int, ...]
_PIECES: Final = "devctx-pieces"  # begins the key of pieces that a worker asks another for


def is_barrier(key: Hashable) -> bool:
    """Return whether a key is that of a P2P rechunk's barrier."""
    return id_from_key(key) is not None


class Held(NamedTuple):
    """A block that a worker keeps: the worker's address, and the block's library, type, shape."""

    address: str
    library: str
    dtype: Any
    shape: tuple[int, ...]


class DeviceRechunk(_rechunk.ArrayRechunkRun):  # type: ignore[misc]
    """dask's run of a rechunk on one worker.

    When all blocks are there, the workers tell each other what they keep. A task that makes a block
    of the output asks them for their pieces of it. Such tasks need not wait for the event loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks: dict[Index, Any] = {}  # what this worker keeps
        self.held: dict[Index, Held] = {}  # by all workers
        self.grid: Any = None  # the keeper's, of the blocks and of pieces on their way here
        self.lock = threading.Lock()
        self._first_keeper = _keepers.get(self.local_address)
        _newest[self.local_address, self.id] = self

    @property
    def keeper(self) -> Any:
        """The worker's keeper, while none takes its place; None for dask's own run."""
        return _keepers.get(self.local_address, self._first_keeper)

    @cached_property
    def axes(self) -> list[list[list[tuple[int, slice]]]]:
        """By axis and place in the output: the blocks of the input there, and a slice of each."""
        from dask.array.rechunk import old_to_new  # which needs NumPy

        return old_to_new(self.old, self.new)  # type: ignore[no-any-return]

    def add_partition(self, data: Any, partition_id: Index) -> int:
        keeper = self.keeper
        self.raise_if_closed()
        held = None if keeper is None else keeper.keep(self, partition_id, data)
        if held is None:
            return int(super().add_partition(data, partition_id))
        self.held[partition_id] = held
        if self.closed:
            self.blocks = {}
            self.raise_if_closed()
        return int(self.run_id)

    async def barrier(self, run_ids: Sequence[int]) -> int:
        if self.held and (keeper := self.keeper) is not None:
            await keeper.lead_outputs(self)
        return int(await super().barrier(run_ids))

    async def inputs_done(self) -> None:
        await super().inputs_done()
        mine = {at: held for at, held in self.held.items() if held.address == self.local_address}
        if not mine:
            return
        said = [(next(iter(mine)), pickle.dumps(mine))]  # dask's messages have indices and bytes
        others = self.partitions_of.keys() - {self.local_address}
        for answer in await asyncio.gather(*(self.send(address, said) for address in others)):
            if answer["status"] == "error":
                raise P2PConsistencyError(f"a worker of {self} does not take part any more")

    async def _receive(self, data: list[tuple[Index, Any]]) -> None:
        self.raise_if_closed()
        for _, said in data:
            if isinstance(said, bytes):
                self.held |= pickle.loads(said)
        await super()._receive([one for one in data if not isinstance(one[1], bytes)])

    def get_output_partition(self, partition_id: Index, key: Any, **kwargs: Any) -> Any:
        keeper = self.keeper
        self.raise_if_closed()
        here = self.worker_for[partition_id] == self.local_address and self.transferred
        made = keeper.output(self, partition_id) if here and self.held and keeper else None
        if made is None:
            return super().get_output_partition(partition_id, key, **kwargs)
        return made

    def outputs_to_come(self, worker: Worker) -> list[Index]:
        """Return the blocks of the output that are made on this worker, in their order."""
        waiting = [
            (ts.priority, index)
            for ts in tuple(worker.state.tasks.values())
            if ts.state in ("executing", "ready", "waiting")
            and (index := _output_of(ts.run_spec, self.id)) is not None
            and self.worker_for[index] == self.local_address
        ]
        return [index for _, index in sorted(waiting)]

    async def fetched(self, worker: Worker, address: str, asked: tuple[Index, ...]) -> Any:
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
        self.blocks, self.grid = {}, None
        await super().close()
        self.blocks, self.grid = {}, None  # of a task that came meanwhile


_newest: WeakValueDictionary[tuple[str, str], DeviceRechunk] = WeakValueDictionary()
_keepers: dict[str, Any] = {}  # `worker.rechunks.Rechunks` by the worker's address


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
_PARTS: Final = (
    (_rechunk, "ArrayRechunkRun", DeviceRechunk, _rechunk.ArrayRechunkRun),
    (ShuffleWorkerPlugin, "get_or_create_shuffle", _get_or_create_shuffle, _get_or_create),
    (ShuffleWorkerPlugin, "get_shuffle_run", _get_shuffle_run, _get_run),
)


@contextmanager
def rechunking(worker: Worker, keeper: Any) -> Iterator[None]:
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

    with patched(_keepers, address, keeper, *_PARTS), wrapped_handler(worker, "get_data", wrap):
        yield


def lead_outputs(scheduler: Scheduler, shuffle: str, number: int) -> None:
    """Send each task that makes a block of a rechunk's output to the block's worker at once.

    dask lets it run anywhere, where it finds its worker out, and then again there.
    """
    plugin = scheduler.plugins["shuffle"]
    state = plugin.active_shuffles.get(shuffle)
    barrier = scheduler.tasks.get(barrier_key(shuffle))
    if state is None or state.run_id != number or barrier is None:
        return
    for ts in barrier.dependents:
        index = _output_of(ts.run_spec, shuffle)
        if index is not None:
            plugin._set_restriction(ts, state.run_spec.worker_for[index])


def _output_of(spec: Any, shuffle: str) -> Index | None:
    """Return the block of a rechunk's output that a task makes, maybe fused with other tasks."""
    args: Any = getattr(spec, "args", ())
    if getattr(spec, "func", None) is _rechunk.rechunk_unpack:
        return args[1] if args[0] == shuffle else None
    fused = (one for arg in args if isinstance(arg, dict) for one in arg.values())
    return next((at for one in fused if (at := _output_of(one, shuffle)) is not None), None)
