"""The parts of a worker that device memory concerns: copies, staging memory, tasks, records."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from distributed import Worker

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import Stamp
from dask_devctx.worker.memory.kept import Kept

if TYPE_CHECKING:
    from dask_devctx.worker.failures.oom_retries import Retries
    from dask_devctx.worker.inputs.inputs import Inputs
    from dask_devctx.worker.memory.manager import DeviceMemory
    from dask_devctx.worker.metrics.history import History
    from dask_devctx.worker.metrics.record import Record
    from dask_devctx.worker.peers import PeerTransfers

# The tasks in these states need their inputs soon.
_NEED_INPUTS: Final = frozenset({"waiting", "ready", "constrained", "executing", "resumed"})


class Surroundings:
    """Answers the questions of a worker's :class:`DeviceMemory`; on any thread.

    Parameters
    ----------
    worker
        The worker.
    inputs
        Has the copies, and knows the work that makes each value; None if there are no copies.
    peers
        Has the staging memory.
    history
        Notes the values that leave and come back.
    """

    def __init__(
        self, worker: Worker, inputs: Inputs | None, peers: PeerTransfers, history: History
    ) -> None:
        self.worker_name = f"worker {worker.name}"
        self._loop = worker.loop
        self._tasks = worker.state.tasks
        self._inputs = inputs
        self._peers = peers
        self._history = history
        # Called on the event loop with each value that has left its device or come back.
        self.show: Callable[[Kept], object] = lambda kept: None
        # Whether a task has a device for itself, since memory ran out for it.
        self.is_short_of: Callable[[Device], bool] = lambda device: False

    def tell(self, memory: DeviceMemory | None, record: Record, retries: Retries) -> None:
        """Let the records have the counts, and tasks without memory the memory of others."""
        drop_replicas, inputs = retries.drop_replicas, self._inputs

        def clear(device: Device) -> None:
            if inputs is not None:
                inputs.ahead.acquire()  # the copy ahead that is under way
                inputs.ahead.release()
            if memory is not None:
                memory.reservations.wait_for_results(device)
            retries.free(device)

        retries.clear = clear
        if memory is None:
            return
        retries.stock = memory.stock
        for name in memory.books.counts:
            record.memory[name] = partial(memory.books.count, name)
        spill_all = memory.leaving.spill_all
        retries.drop_replicas = lambda device: drop_replicas(device) + spill_all(device)

    def copies(self, device: Device) -> int:
        """Return the bytes of a device that copies and staging memory take."""
        copies = 0 if self._inputs is None else self._inputs.replicas.nbytes(device)
        return copies + self._peers.staging_nbytes(device)

    def drop_copies(self, device: Device, nbytes: int) -> int:
        """Drop at least so many bytes of the copies on a device; return the bytes."""
        return 0 if self._inputs is None else self._inputs.replicas.drop_some(device, nbytes)

    def next_use(self, key: Hashable) -> Any:
        """Return the priority of the next task that needs a value; None if none is known."""
        ts = self._tasks.get(key)
        if ts is None or not ts.dependents:
            return None
        return min(
            (
                dep.priority
                for dep in list(ts.dependents)  # at once: the event loop changes it
                if dep.state in _NEED_INPUTS and dep.priority is not None
            ),
            default=None,
        )

    def places(self, key: Hashable) -> Mapping[Device, int] | None:
        """Return the bytes by device of a value that a task just made; None if not known."""
        lifetime = None if self._inputs is None else self._inputs.lifetimes.get(key)
        return None if lifetime is None else lifetime.places

    def made_by(self, kept: Kept) -> Stamp | None:
        """Return the stamp of the work that makes a value; None if it is not known."""
        return None if self._inputs is None else self._inputs.work_of(kept)

    def brought(self, kept: Kept, places: Mapping[Device, int], after: Stamp) -> None:
        """Note where a value comes back, before a task can see it there."""
        if self._inputs is not None:
            self._inputs.brought(kept, places, after)

    def moved(self, kept: Kept) -> None:
        """Note that a value has left its device or come back."""
        try:
            self._loop.add_callback(self.show, kept)
        except RuntimeError:  # the loop has ended
            return

    def copied(self, device: Device, nbytes: int, seconds: float, *, back: bool) -> None:
        """Note the bytes that left a device, or came back to it."""
        ends = ("host", device.uuid) if back else (device.uuid, "host")
        self._history.copied(*ends, nbytes, seconds, "spill")
