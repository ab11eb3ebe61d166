"""Retries of tasks that ran out of a device's memory, after memory is freed."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from distributed import Reschedule
from distributed.protocol.pickle import dumps, loads

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_caches, requested_nbytes
from dask_devctx.errors import DevctxError, DeviceOutOfMemoryError

logger = logging.getLogger(__name__)

# A task that ran out of memory is remembered until it is done on this worker. A task that moved to
# another worker is never done here, so the oldest tasks are forgotten beyond this number.
_REMEMBERED_RETRIES = 10_000

# The limit of a device in bytes, None without one, and the bytes that could not leave, by reason.
Stock = tuple[int | None, Mapping[str, int]]


class Retries:
    """The tasks of one worker that ran out of a device's memory."""

    def __init__(self, devices: Sequence[Device], most: int) -> None:
        self.counted: Counter[Device] = Counter()
        # How often each task ran out of memory, and whether the device has as many bytes as it
        # asked for last: if not, nothing that is freed helps it.
        self.tried: OrderedDict[Hashable, tuple[int, bool]] = OrderedDict()
        # Frees the copies of other devices' values on a device; returns their bytes.
        self.drop_replicas: Callable[[Device], int] = lambda device: 0
        # Frees all that is not in use on a device that a task has for itself.
        self.clear: Callable[[Device], object] = lambda device: None
        # Returns a device's limit, and the bytes that could not leave at an error, by reason.
        self.stock: Callable[[BaseException, Device], Stock] = lambda error, device: (None, {})
        self.on_retry: Callable[[Hashable, Device, Exception], object] = lambda *given: None
        self._devices = tuple(devices)
        self._most = most
        self._lock = threading.Lock()
        self._next_device: OrderedDict[Hashable, Device] = OrderedDict()

    def redirect(self, key: Hashable) -> Device | None:
        """Return, once, the device for a task's next attempt; None for any device."""
        if not self._next_device:  # called for each task
            return None
        with self._lock:
            return self._next_device.pop(key, None)

    def is_last(self, key: Hashable) -> bool:
        """Return whether a task ran out of memory as often as it may: it runs alone once more."""
        attempts, is_fit = self.tried.get(key, (0, False))
        return is_fit and 0 < self._most <= attempts

    def make_room(
        self, key: Hashable, movable: bool, device: Device, error: Exception
    ) -> Exception | None:
        """Free memory for a task that ran out of it; return the exception to raise.

        None to try it again here at once, ``Reschedule`` to try it on another device, and ``error``
        itself if it does not concern memory.
        """
        if not is_out_of_memory(error):
            if not isinstance(error, Reschedule):
                self.forget(key)
            return error
        requested = requested_nbytes(error)
        with self._lock:
            self.counted[device] += 1
            attempts, is_fit = self.tried.pop(key, (0, True))[0] + 1, fits(requested, device)
            self.tried[key] = attempts, is_fit
            _forget_the_oldest(self.tried)
        replicas = self.free(device) if is_fit else 0
        if attempts > self._most:
            self.forget(key)
            return self._failure(device, error, requested, replicas, attempts)
        self.on_retry(key, device, error)
        best = self._most_free(device) if movable else device
        logger.info("%r ran out of memory on %s; trying it again on %s", key, device, best)
        if best is device:
            return None
        # The task goes through the scheduler, so that it runs on the other device's own threads and
        # its inputs move there as for any task.
        with self._lock:
            self._next_device[key] = best
            _forget_the_oldest(self._next_device)
        elsewhere: Exception = Reschedule()
        return elsewhere

    def of_a_method(self, key: Hashable, device: Device, error: Exception) -> Exception:
        """Return the exception of an actor's method, which is not tried again."""
        if not is_out_of_memory(error):
            return error
        with self._lock:
            self.counted[device] += 1
        requested = requested_nbytes(error)
        failure = self._failure(device, error, requested, self.free(device), 1)
        failure.add_note(
            "A method of an actor is not tried again: it may have changed the actor's state"
        )
        return failure

    def _failure(
        self,
        device: Device,
        error: Exception,
        requested: int | None,
        replicas: int,
        attempts: int,
    ) -> DeviceOutOfMemoryError:
        free, total = _memory_info(device)
        failure = DeviceOutOfMemoryError(
            str(device),
            device.uuid,
            requested,
            free,
            total,
            discovery.processes(device._backend, device.info),
            replicas,
            attempts,
            *self.stock(error, device),
        )
        failure.__cause__ = portable(error)
        return failure

    def free(self, device: Device) -> int:
        """Free all memory of a device that is not in use; return the bytes of dropped copies."""
        dropped = self.drop_replicas(device)
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


def fits(requested: int | None, device: Device) -> bool:
    """Return whether a device has so much memory at all; else it is freed in vain."""
    _, total = _memory_info(device)
    return requested is None or total is None or requested <= total


def _forget_the_oldest(remembered: OrderedDict[Hashable, Any]) -> None:
    while len(remembered) > _REMEMBERED_RETRIES:
        remembered.popitem(last=False)


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
        return discovery.memory_info(device._backend, device.info) or _by_driver(device)
    except DevctxError:
        return None, None


def _by_driver(device: Device) -> tuple[int | None, int | None]:
    if not device._handle:
        return None, device.info.total_memory
    return device.memory_info
