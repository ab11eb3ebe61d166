"""Puts the limits of device memory into force on a worker, and takes them away again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from distributed import Status, Worker

from dask_devctx.config.host_memory import fair_memory
from dask_devctx.config.options import Options
from dask_devctx.config.packages import rmm_keeps_memory
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import replaced_data, wrapped_handler
from dask_devctx.errors import DriverError
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.memory.data import SENDING, DeviceData
from dask_devctx.worker.memory.limits import limit_nbytes
from dask_devctx.worker.memory.manager import DeviceMemory
from dask_devctx.worker.memory.surroundings import Surroundings
from dask_devctx.worker.peers.connections import SAYS

if TYPE_CHECKING:
    from collections.abc import MutableMapping

# The fraction of a worker's host memory that may be page-locked.
_PAGE_LOCKED: Final = 0.4


@contextmanager
def within_limits(
    worker: Worker,
    devices: Sequence[Device],
    options: Options,
    around: Surroundings,
    on_failure: Callable[[Device, DriverError], object],
) -> Iterator[DeviceMemory | None]:
    """While it is open, the values that a worker keeps stay within the limits of its devices.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    devices
        Its devices.
    options
        The options of the plugin: ``device_memory_limit``, and those of RMM.
    around
        The parts of the worker that it concerns.
    on_failure
        Called with a device that failed, and the driver's error.

    Yields
    ------
    DeviceMemory or None
        None without a limit, or without devices.
    """
    limits = {device: limit_nbytes(device, options.device_memory_limit) for device in devices}
    known = {device: nbytes for device, nbytes in limits.items() if nbytes is not None}
    if not known:
        yield None
        return
    largest = max(known.values())
    pool = PageLockedPool(
        devices[0],
        int(_PAGE_LOCKED * (worker.memory_manager.memory_limit or fair_memory(len(devices)))),
        slab=min(largest // 16, 256 * 2**20),
        make_room=lambda nbytes: memory.spill_clean(nbytes),
    )

    before = worker.data.memory if isinstance(worker.data, DeviceData) else None
    memory = DeviceMemory(known, pool, around, on_failure, before)
    memory.leaving.looks_at_others = not rmm_keeps_memory(options)
    data: DeviceData

    def wrap(before: MutableMapping[Any, Any]) -> DeviceData:
        nonlocal data
        data = DeviceData(before, memory)
        around.show = data.moved
        return data

    def unwrap() -> MutableMapping[Any, Any]:
        memory.leaving.stop()
        pool.close()
        return data if worker.status is Status.closing or data.keep_on() else data.raw

    try:
        with replaced_data(worker, wrap, unwrap), wrapped_handler(worker, "get_data", _sending):
            yield memory
    finally:
        memory.leaving.stop()


def _sending(get_data: Callable[..., Any]) -> Callable[..., Any]:
    async def get_data_from_the_host(comm: Any, keys: Collection[Hashable], **kwargs: Any) -> Any:
        # Within a process nothing is serialized: the receiver gets the objects that are read here.
        if str(getattr(comm, "local_address", "")).startswith("inproc"):
            return await get_data(comm, keys=keys, **kwargs)
        # A worker that says more than its address takes values as they are in host memory.
        understood = SAYS in (kwargs.get("who") or "")
        token = SENDING.set("kept" if understood else "value")
        try:
            return await get_data(comm, keys=keys, **kwargs)
        finally:
            SENDING.reset(token)

    return get_data_from_the_host
