"""Room for tasks that ran out of a device's memory, and are tried again in place."""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dask.utils import key_split

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import release_library_caches, requested_nbytes
from dask_devctx.errors import DevctxError, DeviceOutOfMemoryError
from dask_devctx.worker.failures.running_calls import Call

if TYPE_CHECKING:
    from dask_devctx.worker.metrics.history import History
    from dask_devctx.worker.peers.transfers import PeerTransfers
    from dask_devctx.worker.values.spill import Spill

logger = logging.getLogger(__name__)

_REMEDIES: Final = {  # by the first word of a task's key; "" for a method of an actor
    "": "A method of an actor is not tried again: it may have changed the actor's state",
    "finalize": "x.map_blocks(lambda block: block.get()).compute() joins an array on the host",
    "rechunk": "x.rechunk(..., block_size_limit=1) joins no blocks on the way",
}


class Retries:
    """Makes room for the calls of one worker that ran out of a device's memory."""

    peers: PeerTransfers
    spill: Spill | None = None  # where the worker has devices: an actor may have those of before

    def __init__(self, most: int, history: History) -> None:
        self.counted: Counter[Device] = Counter()
        self._most = most
        self._history = history
        self._lock = threading.Lock()

    def make_room(self, call: Call, error: Exception) -> Exception | None:
        """Free memory for a call that ran out of it; return its error, or None to try it again."""
        devices, device = call.devices, call.devices[0]
        requested = requested_nbytes(error)
        # Of a device that never has so much memory, none is freed in vain.
        fitting = [one for one in devices if (requested or 0) <= (_memory_info(one)[1] or math.inf)]
        for one in fitting:
            self._free(one)
        with self._lock:
            self.counted[device] += 1
        call.attempts += 1
        if call.is_task and call.attempts <= self._most:
            text = f"{type(error).__name__}: {error}"
            self._history.happened("out-of-memory", device.uuid, call.key, text)
            logger.info("%r ran out of memory on %s, and is tried again", call.key, device)
            call.is_last = device in fitting and call.attempts == self._most
            return None
        failure = DeviceOutOfMemoryError(
            str(device),
            device.uuid,
            requested,
            *_memory_info(device),
            discovery.processes(device._backend, device.info),
            call.attempts,
            *((None, {}) if self.spill is None else self.spill.stock(device, call.stayed)),
            os.getpid(),
        )
        failure.__cause__, failure.__traceback__ = error, error.__traceback__
        if note := _REMEDIES.get(key_split(call.key).partition("-")[0] if call.is_task else ""):
            failure.add_note(note)
        return failure

    def clear(self, device: Device) -> None:
        """Free all that is not in use on a device that a task has for itself."""
        if self.spill is not None:
            self.spill.wait_for_all(device)
        self._free(device)
        time.sleep(0.005)  # other threads let go of what they have just stored, or spilled

    def _free(self, device: Device) -> None:
        """Free all memory of a device that is not in use."""
        if self.spill is not None:
            self.spill.clear(device)
        self.peers.free_staging(device)
        with suppress(DevctxError), device:
            gc.collect()
            release_library_caches()


def _memory_info(device: Device) -> tuple[int | None, int | None]:
    """Return free and total bytes, each None if unknown."""
    try:
        return device.memory_info
    except DevctxError:
        return None, device.info.total_memory
