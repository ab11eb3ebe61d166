"""Retries of tasks that ran out of a device's memory, after memory is freed."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from distributed import Reschedule
from distributed.protocol.pickle import dumps, loads

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_caches, requested_nbytes
from dask_devctx.errors import DevctxError, DeviceOutOfMemoryError
from dask_devctx.worker.failures.calls import Call

if TYPE_CHECKING:
    from dask_devctx.worker.metrics.history import History
    from dask_devctx.worker.peers.transfers import PeerTransfers
    from dask_devctx.worker.values.store import Store

logger = logging.getLogger(__name__)

# A task that ran out of memory is remembered until it is done on this worker. A task that moved to
# another worker is never done here, so the oldest tasks are forgotten beyond this number.
_REMEMBERED: Final = 10_000


class _Tried(NamedTuple):
    """How often a task ran out of memory, and where it is tried next."""

    attempts: int = 0
    # Whether the device has as many bytes as it asked for last: else nothing that is freed helps.
    fits: bool = False
    next_device: Device | None = None


_NEVER: Final = _Tried()


class Retries:
    """The tasks of one worker that ran out of a device's memory."""

    peers: PeerTransfers
    store: Store | None = None  # without devices

    def __init__(self, devices: Sequence[Device], most: int, history: History) -> None:
        self.counted: Counter[Device] = Counter()
        self.tried: OrderedDict[Hashable, _Tried] = OrderedDict()
        self._devices = tuple(devices)
        self._most = most
        self._history = history
        self._lock = threading.Lock()

    def redirect(self, key: Hashable) -> Device | None:
        """Return the device for a task's next attempt; None for any device."""
        return self.tried.get(key, _NEVER).next_device if self.tried else None

    def is_last(self, key: Hashable) -> bool:
        """Return whether a task ran out of memory as often as it may: it runs alone once more."""
        tried = self.tried.get(key, _NEVER)
        return tried.fits and 0 < self._most <= tried.attempts

    def make_room(self, call: Call, error: Exception) -> Exception | None:
        """Free memory for a call that ran out of it; return the exception to raise.

        None to try it again here at once, ``Reschedule`` to try it on another device, and ``error``
        itself if it does not concern memory.
        """
        key, devices, device = call.key, call.devices, call.devices[0]
        if not is_out_of_memory(error):
            if not isinstance(error, Reschedule):
                self.forget(key)
            return error
        requested = requested_nbytes(error)
        attempts = self.tried.get(key, _NEVER).attempts + 1 if call.is_task else 1
        fitting = [one for one in devices if _fits(requested, one)]
        dropped = sum(map(self._free, fitting))
        with self._lock:
            self.counted[device] += 1
        if not call.is_task or attempts > self._most:
            self.forget(key)
            failure = DeviceOutOfMemoryError(
                str(device),
                device.uuid,
                requested,
                *_memory_info(device),
                discovery.processes(device._backend, device.info),
                dropped,
                attempts,
                *((None, {}) if self.store is None else self.store.spill.stock(error, device)),
            )
            failure.__cause__ = portable(error)
            if not call.is_task:
                failure.add_note(
                    "A method of an actor is not tried again: it may have changed the actor's state"
                )
            return failure
        text = f"{type(error).__name__}: {error}"
        self._history.happened("out-of-memory", device.uuid, key, text)
        # For another device, the task goes through the scheduler, so that it runs on that device's
        # own threads and its inputs move there as for any task.
        best = self._most_free(device) if call.movable else device
        logger.info("%r ran out of memory on %s; trying it again on %s", key, device, best)
        with self._lock:
            self.tried[key] = _Tried(attempts, device in fitting, best)
            self.tried.move_to_end(key)
            if len(self.tried) > _REMEMBERED:
                self.tried.popitem(last=False)
        return None if best is device else Reschedule()

    def clear(self, device: Device) -> None:
        """Free all that is not in use on a device that a task has for itself."""
        if self.store is not None:
            self.store.spill.wait_for_all(device)
        self._free(device)

    def _free(self, device: Device) -> int:
        """Free all memory of a device that is not in use; return the bytes of dropped values."""
        dropped = 0 if self.store is None else self.store.spill.clear(device)
        dropped += self.peers.free_staging(device)
        try:
            with device:
                release_caches()
        except DevctxError:  # there is no room for a context, so no cache is on it
            logger.debug("no caches released on %s", device, exc_info=True)
        return dropped

    def _most_free(self, device: Device) -> Device:
        free = {one: _memory_info(one)[0] or 0 for one in self._devices}
        best = max(self._devices, key=free.__getitem__)
        return best if free[best] > free.get(device, 0) else device

    def forget(self, key: Hashable) -> None:
        """Forget the attempts of a task."""
        if self.tried:  # called for each task
            with self._lock:
                self.tried.pop(key, None)


def _fits(requested: int | None, device: Device) -> bool:
    """Return whether a device has so much memory at all; else it is freed in vain."""
    total = _memory_info(device)[1]
    return requested is None or total is None or requested <= total


def portable(error: BaseException) -> BaseException:
    """Return an exception that can be sent to the client; one that cannot is replaced."""
    try:
        loads(dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    return error


def _memory_info(device: Device) -> tuple[int | None, int | None]:
    """Return free and total bytes, each None if unknown; this makes no context."""
    try:
        if device._handle:
            return device.memory_info
        unknown = None, device.info.total_memory
        return discovery.memory_info(device._backend, device.info) or unknown
    except DevctxError:
        return None, None
