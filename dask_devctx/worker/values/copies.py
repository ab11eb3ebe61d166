"""Copies of values on further devices: made once, shared by tasks, and dropped in time."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import allocated
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import Stamp, hold, nbytes_by_device, release_held
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.traffic import TrafficCounts
from dask_devctx.worker.values.host_form import wait_for
from dask_devctx.worker.values.value import AWAY, Value

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Copy:
    """A value on a further device."""

    value: Value
    device: Device
    whole: Any
    stamp: Stamp  # of the copy
    nbytes: int  # counts toward the limit
    expected: bool  # made ahead, and no task has used it yet


class _There(dict[Copy, None]):
    """The copies on a device, the last used one last; the values know them, too."""

    nbytes = 0  # the event loop reads it
    uses: tuple[Stamp, ...] = ()  # of tasks whose work may still read copies, dropped or not


class Copies:
    """The copies of one worker's values; thread-safe.

    A task must not write to its inputs: it shares them. ``limit`` is the fraction of each device's
    memory that copies may take; the least recently used ones are dropped beyond it, and with 0 none
    is kept. A thread makes copies ahead of their tasks.
    """

    def __init__(
        self,
        limit: float,
        counts: TrafficCounts,
        holds_back: Callable[[Device], bool] = lambda device: False,
    ) -> None:
        self.limit = float(limit)
        self.ahead = threading.Lock()  # held while an input is copied ahead of its task
        self.there: dict[Device, _There] = defaultdict(_There)
        self._counts = counts
        # Whether a task has a device for itself: nothing is copied there ahead of others.
        self._holds_back = holds_back
        self._lock = threading.RLock()
        self._open = True
        self._event_loop = threading.get_ident()
        # No executor: a future for each task costs the event loop ten times what this does.
        self._later: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._do_later, name="devctx-copies", daemon=True).start()

    def close(self) -> None:
        """Make no more copies, and drop all; memory that is being read stays until then."""
        with self._lock:
            self._open = False
            self._remove([copy for there in self.there.values() for copy in there])
        self._later.put(None)

    # -- ahead of tasks

    def make_ahead(self, values: Iterable[Value], device: Device, *others: Device) -> None:
        """Begin to copy a task's inputs while it waits, as far as there is room on its device."""
        here = {device, *others}
        for value in values:
            near = device in value.copies or value.nbytes.keys() <= here
            # Do not wake the thread for nothing: it takes the GIL from other threads.
            if value.value is AWAY or not near:
                self._later.put(partial(self._make_ahead, value, device))

    def drop_later(self, value: Value) -> None:
        """Drop a value's copies: freeing memory, and the lock, would delay the event loop."""
        self._later.put(lambda: self._remove([*value.copies.values()]))

    def _do_later(self) -> None:
        while (do := self._later.get()) is not None:
            do()
            del do  # keep no values while the thread waits

    def _make_ahead(self, value: Value, device: Device) -> None:
        with self.ahead:
            if not self._open or value.released or self._holds_back(device):
                return
            try:
                with value.spill.pinned(value, device) as whole:
                    nbytes = sum(value.nbytes.values()) - value.nbytes.get(device, 0)
                    if nbytes and self.there[device].nbytes + nbytes <= self._most(device):
                        self.get(value, whole, device, ahead=True)
            except Exception:  # the task tries again, and fails with this error if it remains
                logger.debug("%r was not copied ahead to %s", value.key, device, exc_info=True)

    def _most(self, device: Device) -> int:
        return int(self.limit * device.memory_info.total)

    # -- for tasks

    def get(self, value: Value, whole: Any, device: Device, *, ahead: bool = False) -> Any:
        """Return a copy of a value, which is ``whole``, for this thread's streams of a device.

        One thread makes a copy, and others that need it wait.
        """
        sources = {one: nbytes for one, nbytes in value.nbytes.items() if one is not device}
        copy = value.copies.get(device)
        if copy is None:
            with value.moving:
                copy = value.copies.get(device)  # another thread may have made it
                if copy is None:
                    return self._made(value, whole, sources, device, ahead)
        with self._lock:
            there = self.there[device]
            if copy in there:
                there[copy] = there.pop(copy)
            first, copy.expected = copy.expected, copy.expected and ahead
            if not first and not ahead:
                self._counts.saved(sources, device)
        copy.stamp.hold_back(device)
        return copy.whole

    def _made(
        self, value: Value, whole: Any, sources: dict[Device, int], device: Device, ahead: bool
    ) -> Any:
        begun = time.time()

        def move() -> tuple[Any, Any]:
            # Nothing writes to a task's input: its device does not have to wait for the copy.
            move = Move(device, value.work(), guard_source=False, counted=True)
            return move.run(whole), move.timed

        moved, timed = allocated(move, lambda: self.drop(device))
        stamp = Stamp.of_devices([device], blocking=False)
        nbytes = nbytes_by_device(moved).get(device, 0)
        self._counts.copied(sources, device, begun, timed)
        copy = Copy(value, device, moved, stamp, nbytes, ahead)
        with self._lock:
            there, value.copies[device] = self.there[device], copy
            there[copy] = None
            there.nbytes += nbytes
            if value.released or not self._open:  # asked last: their end drops what is there
                self._remove([copy])
            most = self._most(device)
            while there.nbytes > most:
                self._remove([next(iter(there))])
        return moved

    def used(self, copies: Iterable[Any], device: Device, stamp: Stamp) -> None:
        """Note that a task's work reads copies: they live until it is done, dropped or not."""
        # With the default stream the library keeps this order itself.
        hold(stamp, *copies)
        with self._lock:
            there = self.there[device]
            there.uses = (*(use for use in there.uses if not use.done()), stamp)

    # -- dropped

    def drop(self, device: Device, nbytes: float | None = None) -> int:
        """Drop copies on a device, the least recently used ones first, and return their bytes.

        With ``nbytes``, this ends when so much is dropped, and those made ahead of a task stay.
        Without, the memory ran out: this waits for the readers, but on the event loop.
        """
        dropped = 0
        with self._lock:
            uses = self.there[device].uses
            for copy in list(self.there[device]):
                if nbytes is not None and (dropped >= nbytes or copy.expected):
                    continue
                dropped += copy.nbytes
                self._remove([copy])
        if nbytes is None and threading.get_ident() != self._event_loop:
            # A copy that is being read frees its memory when the read is done.
            with suppress(DevctxError):
                for use in uses:
                    wait_for(use)
        if dropped or nbytes is None:
            release_held()
        return dropped

    def _remove(self, copies: Iterable[Copy]) -> None:
        with self._lock:
            for copy in copies:
                there = self.there[copy.device]
                if copy in there:
                    del there[copy], copy.value.copies[copy.device]
                    there.nbytes -= copy.nbytes
