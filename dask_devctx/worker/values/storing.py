"""Puts a store in the place of a worker's data, and the limits of device memory into force."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from distributed import Status, Worker

from dask_devctx.config.options import Options, fair_memory, rmm_keeps_memory
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import replaced_data, wrapped_handler
from dask_devctx.errors import DriverError
from dask_devctx.transfer import release_held
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.values.accounting import limit_nbytes
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.spill import Spill
from dask_devctx.worker.values.store import Store
from dask_devctx.worker.values.value import Value

# The fraction of a worker's host memory that may be page-locked.
_PAGE_LOCKED: Final = 0.4
# The tasks in these states need their inputs soon.
_NEED_INPUTS: Final = frozenset({"waiting", "ready", "constrained", "executing", "resumed"})
# How often memory that finished work has read is released, if no other values move.
_RELEASE_S: Final = 0.5


@contextmanager
def storing(
    worker: Worker,
    devices: Collection[Device],
    options: Options,
    copies: Copies | None,
    *,
    takes_values: Callable[[str], bool],
    moved_bytes: Callable[[Device, int, float, bool], object],
    on_failure: Callable[[Device, DriverError], object],
) -> Iterator[Store]:
    """While it is open, a worker keeps its values in a store, within the limits of its devices."""
    limits = {device: limit_nbytes(device, options.device_memory_limit) for device in devices}
    known = {device: nbytes for device, nbytes in limits.items() if nbytes is not None}
    limit = worker.memory_manager.memory_limit or fair_memory(max(len(devices), 1))
    pool = PageLockedPool(
        next(iter(devices)),
        int(_PAGE_LOCKED * limit) if known else 0,
        slab=min(max(known.values(), default=0) // 16, 256 * 2**20),
        make_room=lambda nbytes: spill.drop_host_forms(nbytes),
    )
    before = worker.data.spill if isinstance(worker.data, Store) else None
    spill = Spill(known, pool, copies, before)
    tasks = worker.state.tasks

    def next_use(key: Hashable) -> Any:
        ts = tasks.get(key)
        if ts is None or not ts.dependents:
            return None
        of_those = list(ts.dependents)  # at once: the event loop changes it
        priorities = (dep.priority for dep in of_those if dep.state in _NEED_INPUTS)
        return min((one for one in priorities if one is not None), default=None)

    def moved(value: Value) -> None:
        with suppress(RuntimeError):  # the loop has ended
            worker.loop.add_callback(show, value)

    def show(value: Value) -> None:
        if isinstance(worker.data, Store):  # another plugin's meanwhile
            worker.data.moved(value)

    def unwrap() -> MutableMapping[Any, Any]:
        spill.stop()
        pool.close()
        return store if worker.status is Status.closing else store.give_back()

    def release() -> None:
        """Release what finished work has read, until this is closed and all of it is read."""
        if release_held() or store.open:
            worker.loop.call_later(_RELEASE_S, release)

    spill.worker_name = f"worker {worker.name}"
    spill.next_use, spill.moved = next_use, moved
    spill.moved_bytes, spill.on_failure = moved_bytes, on_failure
    spill.looks_at_others = not rmm_keeps_memory(options)
    store = Store(worker.data, spill, copies)
    try:
        with (
            replaced_data(worker, store, unwrap),
            wrapped_handler(worker, "get_data", lambda get: store.sending(get, takes_values)),
        ):
            spill.start()
            release()
            if copies is not None:
                copies.outlived = lambda: worker.loop.add_callback(release)
            yield store
    finally:
        store.open = False
        spill.stop()
