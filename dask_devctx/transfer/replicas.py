"""Copies of tasks' inputs on other devices: made once, shared, and dropped in time.

This module does not depend on dask's cluster: a key is anything hashable, and its owner says when
to forget it. If one name can mean several values over time, each value has a ``Lifetime`` as key.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.transfer import Stamp, hold, nbytes_by_device, release_held
from dask_devctx.transfer.lifetime import Lifetime
from dask_devctx.transfer.move import After, Move
from dask_devctx.transfer.traffic import TimedCopy, Traffic, TrafficCounts, timing


@dataclass(eq=False)
class _Entry:
    sources: dict[Device, int]
    made: Future[tuple[Any, Stamp]] = field(default_factory=Future)
    nbytes: int = 0  # counts toward the limit; 0 while the copy is being made
    uses: list[Stamp] = field(default_factory=list)
    expected: bool = False  # made ahead, and no task has used it yet


@dataclass(eq=False)
class _Place:
    """The copies on one device."""

    limit: int
    # The last one is the most recently used.
    entries: OrderedDict[Hashable, _Entry] = field(default_factory=OrderedDict)
    nbytes: int = 0  # the sum over the entries, cached: the worker's event loop reads it


class Replicas:
    """One copy per key and device, shared by all tasks that need it there.

    Parameters
    ----------
    limit
        The fraction of each device's memory that copies may take. Beyond it, the least recently
        used copies are dropped; 0 keeps none.

    Attributes
    ----------
    counts
        Counts what is copied, and knows how long it took.

    Raises
    ------
    ValueError
        ``limit`` is not between 0 and 1.

    Notes
    -----
    Thread-safe. Tasks share a copy. Like every input of a dask task it must not be written to: the
    next task would see the change. Copies are read-only if their library supports it (simulated
    arrays do, JAX's arrays always are read-only, CuPy's and torch's cannot be). A task that writes
    in place makes its own copy: ``to_device(value, device, copy=True)``.

    Examples
    --------
    >>> from dask_devctx.simulated_array import SimulatedArray
    >>> replicas = Replicas(limit=0.1)
    >>> x = SimulatedArray((2, 2))
    >>> there = replicas.get("x", x, 1)
    >>> there.device.device_id, there is replicas.get("x", x, 1)
    (1, True)
    >>> replicas.traffic[Device(0), Device(1)]
    Traffic(nbytes=32, copies=1, saved=1, seconds=...)
    """

    def __init__(self, *, limit: float) -> None:
        if not 0 <= limit <= 1:
            raise ValueError(f"limit must be between 0 and 1, got {limit!r}")
        self.limit = float(limit)
        self.counts = TrafficCounts()
        self._lock = threading.RLock()
        self._places: dict[Device, _Place] = {}

    def get(
        self,
        key: Hashable,
        value: Any,
        device: object,
        *,
        after: After = None,
        ahead: bool = False,
        places: Mapping[Device, int] | None = None,
    ) -> Any:
        """Return a value on a device: the existing copy there, or a new one.

        Parameters
        ----------
        key
            Identifies the value until it is forgotten. If it may be forgotten before this call, use
            a :class:`~dask_devctx.transfer.lifetime.Lifetime`.
        value
            The key owner's value, on any device.
        device
            Anything that :class:`~dask_devctx.Device` accepts.
        after
            Stamps of the work that makes the value, as for ``to_device``.
        ahead
            Whether this call prepares a copy for a task that will call this itself. That later call
            does not count as ``saved``.
        places
            The value's bytes per device, if the caller knows them.

        Returns
        -------
        object
            The value, for use on this thread's current streams of the device.

        Raises
        ------
        Exception
            Any error of ``to_device``. If the device is out of memory, this drops all finished
            copies there and tries once more. A failure is not kept: threads that waited for the
            same copy try for themselves.
        """
        device = Device(device)
        sources = nbytes_by_device(value) if places is None else dict(places)
        here = sources.pop(device, None)
        if not sources:
            # Most inputs end here: a move without a copy would take twice as long to start.
            if here is not None:
                release_held(1)
                for stamp in (
                    () if after is None else (after,) if isinstance(after, Stamp) else after
                ):
                    stamp.hold_back(device, of=device)
            return value
        while True:
            with self._lock:
                entries = self._place(device).entries
                entry = entries.get(key)
                mine = entry is None
                if entry is None:
                    entry = _Entry(sources, expected=ahead)
                    if _may_keep(key):
                        entries[key] = entry
                else:
                    entries.move_to_end(key)
            if mine:
                return self._make(key, entry, value, device, after)
            if entry.made.exception() is not None:  # waits; the maker's thread raises the error
                continue
            moved, stamp = entry.made.result()
            with self._lock:
                first, entry.expected = entry.expected, entry.expected and ahead
                if not first and not ahead:
                    self.counts.saved(sources, device)
            stamp.hold_back(device)
            return moved

    def _make(self, key: Hashable, entry: _Entry, value: Any, device: Device, after: After) -> Any:
        start, begun = time.perf_counter(), time.time()
        try:
            try:
                moved, timed = self._move(value, device, after)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.drop_all(device)
                release_held()
                moved, timed = self._move(value, device, after)
            stamp = Stamp.of_streams([device])
            nbytes = nbytes_by_device(moved).get(device, 0)
        except BaseException as error:
            with self._lock:
                self._remove(device, key, entry)
            entry.made.set_exception(error)
            raise
        seconds = time.perf_counter() - start
        self.counts.copied(entry.sources, device, begun, seconds, timed)
        entry.made.set_result((moved, stamp))
        with self._lock:
            place = self._places[device]
            if place.entries.get(key) is entry:  # not forgotten in the meantime
                entry.nbytes = nbytes
                place.nbytes += nbytes
                self._keep_to_limit(device)
        return moved

    @staticmethod
    def _move(value: Any, device: Device, after: After) -> tuple[Any, list[TimedCopy]]:
        # Nothing writes to a task's input, so its device does not have to wait for the copy.
        with timing() as timed:
            return Move(device, after, guard_source=False, read_only=True).run(value), timed

    def used(
        self, copies: Iterable[tuple[Hashable, Any]], device: object, stamp: Stamp | None
    ) -> None:
        """Note that the work of ``stamp`` reads copies on a device.

        Call this when a task has given its work to the device. A copy that is dropped while the
        work reads it is then kept alive until the work is done. Threads with their own streams need
        this; with the default stream the library itself keeps this order.

        Parameters
        ----------
        copies
            Results of :meth:`get`, each with its key. Copies that were dropped already are held
            until the work is done.
        device
            The device of the copies.
        stamp
            The work; with None this does nothing.
        """
        if stamp is None:
            return
        dropped = []
        with self._lock:
            place = self._places.get(Device(device))
            for key, moved in copies:
                entry = None if place is None else place.entries.get(key)
                if entry is None or not entry.made.done() or entry.made.result()[0] is not moved:
                    dropped.append(moved)
                else:
                    entry.uses = [use for use in entry.uses if not use.done()] + [stamp]
        if dropped:
            hold(stamp, *dropped)

    def forget(self, key: Hashable) -> None:
        """Drop the copies of a key on all devices; its owner does not need it any more."""
        with self._lock:
            if isinstance(key, Lifetime):
                key.ended = True
            for device, place in self._places.items():
                entry = place.entries.get(key)
                if entry is not None:
                    self._remove(device, key, entry)

    def drop_all(self, device: object = None) -> int:
        """Drop every finished copy on a device, or on all; return the bytes. Keys stay usable."""
        with self._lock:
            wanted = None if device is None else Device(device)
            dropped = 0
            for each, place in self._places.items():
                if wanted is not None and each is not wanted:
                    continue
                for key, entry in list(place.entries.items()):
                    if entry.made.done():
                        dropped += entry.nbytes
                        self._remove(each, key, entry)
        return dropped

    def drop_some(self, device: Device, nbytes: int) -> int:
        """Drop copies on a device, the least recently used first, and return their bytes.

        Copies that were made ahead of a task stay for it.
        """
        with self._lock:
            dropped = 0
            place = self._places.get(device)
            for key, entry in list(place.entries.items()) if place is not None else ():
                if dropped >= nbytes:
                    break
                if entry.nbytes and not entry.expected:
                    dropped += entry.nbytes
                    self._remove(device, key, entry)
        return dropped

    def wants(self, key: Hashable, device: Device, nbytes: int) -> bool:
        """Return whether the device has no copy for a key yet, and has room for one."""
        with self._lock:
            place = self._place(device)
            return key not in place.entries and place.nbytes + nbytes <= place.limit

    def devices(self, key: Hashable) -> list[Device]:
        """Return the devices that have a copy for a key, or will have one soon."""
        with self._lock:
            return [device for device, place in self._places.items() if key in place.entries]

    def nbytes(self, device: object) -> int:
        """Return the bytes of the copies that are kept on a device."""
        with self._lock:
            place = self._places.get(Device(device))
            return 0 if place is None else place.nbytes

    @property
    def traffic(self) -> dict[tuple[Device, Device], Traffic]:
        """The traffic until now, for each pair of source and destination."""
        return self.counts.rows()

    # -- with the lock held

    def _place(self, device: Device) -> _Place:
        place = self._places.get(device)
        if place is None:
            place = self._places[device] = _Place(int(self.limit * device.memory_info.total))
        return place

    def _remove(self, device: Device, key: Hashable, entry: _Entry) -> None:
        place = self._places[device]
        if place.entries.get(key) is entry:
            del place.entries[key]
            place.nbytes -= entry.nbytes
            for use in entry.uses:
                hold(use, entry.made)

    def _keep_to_limit(self, device: Device) -> None:
        place = self._places[device]
        while place.nbytes > place.limit:
            # Entries of 0 bytes are still being made: each calls this when it is done.
            key, entry = next(item for item in place.entries.items() if item[1].nbytes)
            self._remove(device, key, entry)


def _may_keep(key: Hashable) -> bool:
    if isinstance(key, Lifetime):
        key.copied = True
        return not key.ended
    return True
