"""Copies of values on further devices: made once, shared by tasks, and dropped in time."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import Stamp, hold, nbytes_by_device, release_held
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.traffic import TrafficCounts, timing
from dask_devctx.worker.values.value import AWAY, Value

logger = logging.getLogger(__name__)

# How often a task that ran out of memory checks whether the readers of dropped copies are done.
_LOOK_INTERVAL_S: Final = 0.001

# The copies among a task's inputs, each with its value.
Used = list[tuple[Value, Any]]


@dataclass(eq=False)
class _Copy:
    sources: dict[Device, int]
    made: Future[tuple[Any, Stamp]] = field(default_factory=Future)
    nbytes: int = 0  # counts toward the limit; 0 while the copy is being made
    uses: list[Stamp] = field(default_factory=list)
    expected: bool = False  # made ahead, and no task has used it yet


@dataclass(eq=False)
class _OnDevice:
    limit: int
    all: OrderedDict[Value, _Copy] = field(default_factory=OrderedDict)  # the last used one last
    nbytes: int = 0  # their sum: the worker's event loop reads it


class Copies:
    """The copies of one worker's values; thread-safe.

    A task must not write to its inputs: it shares them. ``limit`` is the fraction of each device's
    memory that copies may take; the least recently used ones are dropped beyond it, and with 0 none
    is kept. A thread makes copies ahead of their tasks.
    """

    metric: Final = "devctx-traffic"

    def __init__(self, limit: float) -> None:
        self.limit = float(limit)
        self.counts = TrafficCounts()
        self.ahead = threading.Lock()  # held while an input is copied ahead of its task
        # Whether a task has a device for itself: nothing is copied there ahead of others.
        self.holds_back: Callable[[Device], bool] = lambda device: False
        self._lock = threading.RLock()
        self._devices: dict[Device, _OnDevice] = {}
        self._open = True
        self._event_loop = threading.get_ident()
        # Called when a task that outlived the plugin reads copies.
        self.outlived: Callable[[], object] = lambda: None
        # No executor: a future for each task costs the event loop ten times what this does.
        self._later: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._do_later, name="devctx-copies", daemon=True).start()

    def close(self) -> None:
        """Make no more copies, and drop all; memory that is being read stays until then."""
        with self._lock:
            self._open = False
            for on_device in self._devices.values():
                for value in list(on_device.all):
                    self.forget(value)
        self._later.put(None)

    # -- ahead of tasks

    def make_ahead(self, values: Iterable[Value], device: Device, *others: Device) -> None:
        """Begin to copy a task's inputs while it waits, as far as there is room on its device."""
        here = {device, *others}
        far = []
        for value in values:
            near = device in value.copies or value.nbytes.keys() <= here
            if value.value is AWAY or not near:
                far.append(value)
        if far:  # do not wake the thread for nothing: it takes the GIL from other threads
            self._later.put(partial(self._make_ahead, far, device))

    def drop_later(self, value: Value) -> None:
        """Drop a value's copies: freeing memory, and the lock, would delay the event loop."""
        self._later.put(partial(self.forget, value))

    def _do_later(self) -> None:
        while (do := self._later.get()) is not None:
            do()
            del do  # keep no values while the thread waits

    def _make_ahead(self, far: Iterable[Value], device: Device) -> None:
        for value in far:
            with self.ahead:
                if not self._open or value.released or self.holds_back(device):
                    continue
                spill = value.spill
                try:
                    whole = value.value if spill is None else spill.pin(value, device)
                    try:
                        nbytes = sum(value.nbytes.values()) - value.nbytes.get(device, 0)
                        if whole is not AWAY and nbytes and self._has_room(value, device, nbytes):
                            self.get(value, whole, device, ahead=True)
                    finally:
                        del whole
                        if spill is not None:
                            spill.unpin([value])
                except Exception:  # the task tries again, and fails with this error if it remains
                    logger.debug("%r was not copied ahead to %s", value.key, device, exc_info=True)

    def _has_room(self, value: Value, device: Device, nbytes: int) -> bool:
        with self._lock:
            there = self._on(device)
            return value not in there.all and there.nbytes + nbytes <= there.limit

    # -- for tasks

    def get(self, value: Value, whole: Any, device: Device, *, ahead: bool = False) -> Any:
        """Return a value for use on this thread's current streams of a device.

        ``whole`` is the value itself. Out of memory, this drops all finished copies there and tries
        once more. A failure is not kept: threads that waited for the copy try for themselves.
        """
        sources = dict(value.nbytes)
        here = sources.pop(device, None)
        if not sources:
            # Most inputs end here: a move without a copy would take twice as long to start.
            if here is not None:
                release_held(1)
                value.work().hold_back(device)
            return whole
        while True:
            with self._lock:
                copies = self._on(device).all
                copy = copies.get(value)
                mine = copy is None
                if copy is None:
                    copy = _Copy(sources, expected=ahead)
                    if self._open:
                        copies[value] = copy
                        value.copies = (*value.copies, device)
                        if value.released:  # asked last: who releases it just now drops its copies
                            self._remove(device, value, copy)
                else:
                    copies.move_to_end(value)
            if mine:
                return self._make(value, copy, whole, device)
            if copy.made.exception() is not None:  # waits; the maker's thread raises the error
                continue
            moved, stamp = copy.made.result()
            with self._lock:
                first, copy.expected = copy.expected, copy.expected and ahead
                if not first and not ahead:
                    self.counts.saved(sources, device)
            stamp.hold_back(device)
            return moved

    def _make(self, value: Value, copy: _Copy, whole: Any, device: Device) -> Any:
        start, begun = time.perf_counter(), time.time()
        try:
            for attempt in range(2):
                # Nothing writes to a task's input: its device does not have to wait for the copy.
                move = Move(device, value.work(), guard_source=False, read_only=True)
                try:
                    with timing() as timed:
                        moved = move.run(whole)
                    break
                except Exception as error:
                    if attempt or not is_out_of_memory(error):
                        raise
                self.drop(device)
                release_held()
            stamp = Stamp.of_streams([device])
            nbytes = nbytes_by_device(moved).get(device, 0)
        except BaseException as error:
            with self._lock:
                self._remove(device, value, copy)
            copy.made.set_exception(error)
            raise
        self.counts.copied(copy.sources, device, begun, time.perf_counter() - start, timed)
        copy.made.set_result((moved, stamp))
        with self._lock:
            there = self._devices[device]
            if there.all.get(value) is copy:  # not dropped in the meantime
                copy.nbytes = nbytes
                there.nbytes += nbytes
                while there.nbytes > there.limit:
                    # Entries of 0 bytes are still being made: each does this when it is done.
                    one, oldest = next(item for item in there.all.items() if item[1].nbytes)
                    self._remove(device, one, oldest)
        return moved

    def used(self, copies: Used, device: Device, stamp: Stamp) -> None:
        """Note that a task's work reads copies: they live until it is done, dropped or not.

        Threads with their own streams need this; with the default stream the library keeps this
        order itself.
        """
        dropped = []
        with self._lock:
            there = self._on(device).all
            for value, moved in copies:
                copy = there.get(value)
                if copy is None or not copy.made.done() or copy.made.result()[0] is not moved:
                    dropped.append(moved)
                else:
                    copy.uses = [use for use in copy.uses if not use.done()] + [stamp]
        if dropped:
            hold(stamp, *dropped)
        if not self._open:
            self.outlived()

    # -- dropped

    def forget(self, value: Value) -> None:
        """Drop the copies of a value on all devices."""
        with self._lock:
            for device in value.copies:
                copy = self._devices[device].all.get(value)
                if copy is not None:
                    self._remove(device, value, copy)

    def drop(self, device: Device, nbytes: int | None = None) -> int:
        """Drop copies on a device, the least recently used ones first, and return their bytes.

        With ``nbytes``, this ends when so much is dropped, and those made ahead of a task stay.
        """
        dropped = 0
        with self._lock:
            for value, copy in list(self._on(device).all.items()):
                if nbytes is not None and (dropped >= nbytes or copy.expected):
                    continue
                if copy.made.done():
                    dropped += copy.nbytes
                    self._remove(device, value, copy)
        return dropped

    def drop_all(self, device: Device) -> int:
        """Drop the copies on a device whose memory ran out, and wait for their readers.

        On the event loop this does not wait.
        """
        with self._lock:
            uses = [use for copy in self._on(device).all.values() for use in copy.uses]
        dropped = self.drop(device)
        if threading.get_ident() != self._event_loop:
            # A copy that is being read frees its memory when the read is done.
            with suppress(DevctxError):
                while not all(use.done() for use in uses):
                    time.sleep(_LOOK_INTERVAL_S)
        release_held()
        return dropped

    def nbytes(self, device: Device) -> int:
        """Return the bytes of the copies that are kept on a device."""
        there = self._devices.get(device)
        return 0 if there is None else there.nbytes

    def _on(self, device: Device) -> _OnDevice:
        there = self._devices.get(device)
        if there is None:
            limit = int(self.limit * device.memory_info.total)
            there = self._devices[device] = _OnDevice(limit)
        return there

    def _remove(self, device: Device, value: Value, copy: _Copy) -> None:
        there = self._devices[device]
        if there.all.get(value) is copy:
            del there.all[value]
            value.copies = tuple(one for one in value.copies if one is not device)
            there.nbytes -= copy.nbytes
            for use in copy.uses:
                hold(use, copy.made)

    def metrics(self, worker: object) -> list[dict[str, Any]]:
        """Return the heartbeat's rows, one for each pair of devices, as plain data."""
        self.counts.measure()
        return [
            {"source": source.uuid, "destination": destination.uuid, **vars(traffic)}
            for (source, destination), traffic in self.counts.rows().items()
        ]
