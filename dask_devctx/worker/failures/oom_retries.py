"""A task that ran out of a device's memory: room is made, and it is tried again."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from distributed import Reschedule
from distributed.protocol.pickle import dumps, loads

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_caches, requested_nbytes
from dask_devctx.errors import DevctxError, DeviceOutOfMemoryError

logger = logging.getLogger(__name__)

# Tasks that ran out of memory are remembered until they are done here. One that was sent to another
# worker never is: the oldest is forgotten then.
_REMEMBERED_RETRIES = 10_000


class Retries:
    """The tasks of one worker that ran out of a device's memory.

    Parameters
    ----------
    devices
        The worker's devices.
    most
        How often a task is tried again.

    Attributes
    ----------
    counted
        How often memory ran out, by device.
    drop_replicas
        Frees the copies of other devices' values that are kept on a device; returns the bytes.
    """

    def __init__(self, devices: Sequence[Device], most: int) -> None:
        self.counted: Counter[Device] = Counter()
        self.drop_replicas: Callable[[Device], int] = lambda device: 0
        self._devices = tuple(devices)
        self._most = most
        self._lock = threading.Lock()
        self._tried: OrderedDict[Hashable, int] = OrderedDict()
        self._next_device: OrderedDict[Hashable, Device] = OrderedDict()

    def redirect(self, key: Hashable) -> Device | None:
        """Return where a task is to be tried again, once; None where it may go anywhere."""
        if not self._next_device:  # asked for each task
            return None
        with self._lock:
            return self._next_device.pop(key, None)

    def make_room(
        self, key: Hashable, movable: bool, device: Device, error: Exception
    ) -> Exception | None:
        """Make room for a task that ran out of memory, and return its exception.

        Parameters
        ----------
        key
            The task's key.
        movable
            Whether it may be tried on another device.
        device
            Where it was.
        error
            What it raised.

        Returns
        -------
        Exception or None
            None where it is to be tried again here and now. ``DeviceOutOfMemoryError`` where it was
            tried often enough, ``distributed.Reschedule`` where it is to be tried on another
            device, and ``error`` itself where that is not about memory.
        """
        if not is_out_of_memory(error):
            if not isinstance(error, Reschedule):
                self.forget(key)
            return error
        self.counted[device] += 1
        requested = requested_nbytes(error)
        replicas = self._make_room(device, error)
        with self._lock:
            attempts = self._tried[key] = self._tried.pop(key, 0) + 1
            _forget_the_oldest(self._tried)
        if attempts > self._most:
            self.forget(key)
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
            )
            failure.__cause__ = portable(error)
            return failure
        best = self._most_free(device) if movable else device
        logger.info("%r ran out of memory on %s; trying it again on %s", key, device, best)
        if best is device:
            return None
        # By way of the scheduler, so that it runs on the other device's own threads and its inputs
        # get there as any task's do.
        with self._lock:
            self._next_device[key] = best
            _forget_the_oldest(self._next_device)
        elsewhere: Exception = Reschedule()
        return elsewhere

    def _make_room(self, device: Device, error: Exception) -> int:
        dropped = self.drop_replicas(device)
        try:
            with device:
                release_caches(error)
        except DevctxError:  # not even a context fits: the caches hold nothing here then
            logger.debug("no caches released on %s", device, exc_info=True)
        return dropped

    def _most_free(self, device: Device) -> Device:
        free = {one: _memory_info(one)[0] or 0 for one in self._devices}
        best = max(self._devices, key=free.__getitem__)
        return best if free[best] > free.get(device, 0) else device

    def forget(self, key: Hashable) -> None:
        """Count from the beginning when the task runs out of memory again."""
        if self._tried:  # asked for each task
            with self._lock:
                self._tried.pop(key, None)


def _forget_the_oldest(remembered: OrderedDict[Hashable, Any]) -> None:
    while len(remembered) > _REMEMBERED_RETRIES:
        remembered.popitem(last=False)


def portable(error: BaseException) -> BaseException:
    """Return an exception that reaches the client: one that cannot be sent takes ours with it."""
    try:
        loads(dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    return error


def _memory_info(device: Device) -> tuple[int | None, int | None]:
    """Free and total bytes, where anybody says; asking makes no context."""
    try:
        return discovery.memory_info(device._backend, device.info) or _by_driver(device)
    except DevctxError:
        return None, None


def _by_driver(device: Device) -> tuple[int | None, int | None]:
    if not device._handle:
        return None, device.info.total_memory
    return device.memory_info
