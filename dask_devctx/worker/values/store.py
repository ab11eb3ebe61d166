"""A worker's data: dask's own mapping, and the values on devices, which it does not count."""

from __future__ import annotations

import inspect
import sys
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from typing import Any, Final

from distributed import Status, Worker

from dask_devctx.config.options import Options
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import replaced_data, told_after
from dask_devctx.errors import DriverError
from dask_devctx.transfer import nbytes_by_device, release_held, walk
from dask_devctx.transfer.traffic import TrafficCounts
from dask_devctx.worker.values.accounting import limit_nbytes, numbers
from dask_devctx.worker.values.copies import Copies
from dask_devctx.worker.values.spill import Spill
from dask_devctx.worker.values.value import AWAY, Value

# Whether the reader in this context sends values to another process.
SENDING: Final[ContextVar[bool]] = ContextVar("devctx-sending", default=False)
_EXECUTE: Final = inspect.unwrap(Worker.execute).__code__
_GET_DATA: Final = inspect.unwrap(Worker.get_data).__code__
# Until Python 3.12, a comprehension in it has code of its own.
_SENDERS: Final = {_GET_DATA, *filter(inspect.iscode, _GET_DATA.co_consts)}
# Of a key whose value dask's own mapping has; the second if it was searched, and holds no arrays
# although its type may.
_IN_RAW: Final = object()
_ON_HOST: Final = object()
_dict: Final[Any] = dict
# Less host memory of a value beside its device memory is not counted.
_LITTLE_NBYTES: Final = 64 * 2**10
# How often memory that finished work has read is released, if no other values move.
_RELEASE_S: Final = 0.5


class Store(MutableMapping[Hashable, Any], _dict):  # type: ignore[misc]
    """A worker's data: storing a value is its arrival, and deleting it is its end.

    Every reader gets the value itself, on its device. There are two exceptions: the worker that
    prepares a task gets the :class:`Value`, which the task's :class:`Use` resolves on its thread;
    one that sends values gets it for those in host memory, or their host forms after the plugin.
    """

    # As a dictionary, it has all keys: with a `Value` on devices, or with the note that dask's own
    # mapping has the value. dask asks ten times for each task whether a key is here: that is no
    # call of Python's.
    __contains__ = _dict.__contains__
    __len__ = _dict.__len__
    __ne__ = object.__ne__  # the opposite of `Mapping.__eq__`; the dictionary's compares the notes

    def __init__(
        self, data: MutableMapping[Any, Any], spill: Spill, *, moves_inputs: bool = True
    ) -> None:
        super().__init__()
        # A store is of a plugin that was removed while values were away.
        self.raw: MutableMapping[Any, Any] = data.raw if isinstance(data, Store) else data
        self.spill = spill
        self.copies = spill.copies
        self.moves_inputs = moves_inputs
        self.open = True  # whether tasks resolve what they get
        self.made: dict[Hashable, Value] = {}  # by tasks, and dask is about to store them
        # A mapping of the user's may have its values anywhere: it gets no `Value`, and is not read.
        fast = getattr(self.raw, "fast", self.raw)
        self._shows = isinstance(fast, dict) or (fast is not self.raw and isinstance(fast, Mapping))
        self._in_memory: Mapping[Any, Any] = fast if self._shows else {}
        notes = _dict.items(data) if isinstance(data, Store) else dict.fromkeys(data, _IN_RAW)
        _dict.update(self, notes)
        if self.raw is not data:  # dask remembers the handlers of before, and so that store
            _dict.clear(data)
        for key, whole in [*self._in_memory.items(), *_dict.items(self)]:
            if whole.__class__ is Value:
                spill.add(whole)
            elif walk.find(whole.__class__) is not None:
                self[key] = whole

    def give_back(self) -> MutableMapping[Any, Any]:
        """Return the data without the plugin: this, while values are in host memory or on disk."""
        self.open = False
        self.made.clear()
        for value in [one for one in _dict.values(self) if one.__class__ is Value]:
            whole = value.value  # read once: a thread may just be moving it
            if whole is AWAY:
                self.moved(value)
                continue
            with suppress(Exception):  # it stays here if dask cannot write it to disk at once
                self.raw[value.key] = whole
                _dict.__setitem__(self, value.key, _IN_RAW)
        on_disk = len(getattr(self.raw, "slow", ()))  # some may be of devices
        others = chain(_dict.values(self), self._in_memory.values())
        return self if on_disk or any(one.__class__ is Value for one in others) else self.raw

    # -- a mapping

    def __getitem__(self, key: Hashable) -> Any:
        value = _dict.get(self, key)
        if value.__class__ is not Value:
            value = self.raw[key]
            if value.__class__ is not Value:
                return value
        if value.spill is None:  # read from disk
            self.spill.add(value)
        if SENDING.get():
            value.touched, whole = next(numbers), value.value
            return value if whole is AWAY else whole
        reader = sys._getframe(1).f_code
        if self.open and reader is _EXECUTE:
            return value
        sends, worker = reader in _SENDERS, self.spill.worker
        if sends and not self.open and value.is_away and not worker.address.startswith("inproc"):
            return value.host_form()  # its device may have no room
        try:
            return self.spill.read(value)
        except Exception:
            if sends:  # dask counts a transfer that fails here as one that never ends
                worker.transfer_outgoing_count -= 1
            raise

    def __setitem__(self, key: Hashable, whole: Any) -> None:
        note = _IN_RAW
        if key in self:
            del self[key]
        if whole.__class__ is Value:  # it comes from another worker, in host memory
            self.spill.add(whole)
            self._put(whole)
            return
        if (found := walk.find(whole.__class__)) is not None:
            value = self.made.pop(key, None)
            if value is None or value.value is not whole:
                value = self._new(key, whole)
            elif value.pins:
                self.spill.unpin([value])
            if value is not None and (value.nbytes or value.is_away):  # it may leave at once
                if found is walk.LEAF:  # an array, which has no host memory
                    _dict.__setitem__(self, key, value)
                else:
                    self._put(value)
                return
            if value is not None:
                note = _ON_HOST
        self.raw[key] = whole
        _dict.__setitem__(self, key, note)

    def __delitem__(self, key: Hashable) -> None:
        value = _dict.pop(self, key)
        if value.__class__ is not Value:
            value = self._in_memory.get(key)
            del self.raw[key]
        if value.__class__ is Value:
            value.released = True
            if value.copies:
                self.copies.drop_later(value)

    def __iter__(self) -> Iterator[Hashable]:
        return iter([*_dict.keys(self)])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} values>"

    def __getattr__(self, name: str) -> Any:
        # dask asks its SpillBuffer for more than a mapping has, and a dictionary for less.
        if name.startswith("__") or name == "raw":
            raise AttributeError(name)
        return getattr(self.raw, name)

    def evict(self) -> int:
        """Write a value in host memory to disk, as dask's own mapping does; -1 if none is there."""
        if self.spill.drop_host_forms(1):
            return 1
        return int(self.raw.evict()) if getattr(self.raw, "fast", None) else -1  # type: ignore[attr-defined]

    # -- values

    def _new(self, key: Hashable, whole: Any) -> Value | None:
        """Return a value, counted if it is on devices; None if not all of it was looked at."""
        try:
            nbytes, complete = nbytes_by_device.found_in(whole, walk.AT_MOST_ON_LOOP)
            if not complete:
                return None
        except Exception:  # of a user's type; the task that gets the value fails with it
            return None
        value = Value(key, whole, nbytes)
        if nbytes:
            self.spill.add(value)
        return value

    def _put(self, value: Value) -> None:
        """Store a value: with dask's own if it is in host memory, or has much of that beside."""
        if self._shows and (value.is_away or value.__sizeof__() > _LITTLE_NBYTES):
            self.raw[value.key] = value  # dask counts the host memory, and writes it to disk
            _dict.__setitem__(self, value.key, _IN_RAW)
        else:
            _dict.__setitem__(self, value.key, value)

    def freed(self, keys: Iterable[Hashable], **message: object) -> None:
        """Forget the results of keys that the scheduler frees before they are stored."""
        for key in keys:
            self.made.pop(key, None)

    def is_host_data(self, key: Hashable) -> bool:
        """Return whether a value's type may hold arrays, and this value holds none."""
        return _dict.get(self, key) is _ON_HOST

    def values_of(self, keys: Iterable[Hashable]) -> list[Value]:
        """Return those of some keys' values that are known to be on devices, or were.

        Those on disk are left out.
        """
        found = []
        for key in keys:
            value = _dict.get(self, key)
            if value is _IN_RAW:
                value = self._in_memory.get(key)
                if value.__class__ is Value and value.spill is None:  # read from disk
                    self.spill.add(value)
            if value.__class__ is Value:
                found.append(value)
        return found

    def looked_for(self, key: Hashable, whole: Any) -> Value | None:
        """Return host data, as it seemed, as a value if it is on devices after all; any thread."""
        if walk.find(whole.__class__) is None or _dict.get(self, key) is _ON_HOST:
            return None
        value = Value(key, whole, nbytes_by_device(whole))
        value.released = True  # no copy is kept for others
        if value.nbytes:
            return value
        self.spill.moved(value)
        return None

    def moved(self, value: Value) -> None:
        """Show dask a value that was spilled as host data, or no longer; on the event loop."""
        kept = self._in_memory.get(value.key)
        if kept is not None and kept is value.value:  # it was searched, and is host data
            _dict.__setitem__(self, value.key, _ON_HOST)
        elif kept is value or _dict.get(self, value.key) is value:
            if kept is value:
                del self.raw[value.key]
            self._put(value)


@contextmanager
def storing(
    worker: Worker,
    devices: Collection[Device],
    options: Options,
    traffic: TrafficCounts,
    *,
    is_alone_on: Callable[[Device], bool],
    on_failure: Callable[[Device, DriverError], object],
) -> Iterator[Store]:
    """While it is open, a worker keeps its values in a store, within the limits of its devices."""

    def moved(value: Value) -> None:
        with suppress(RuntimeError):  # the loop has ended
            worker.loop.add_callback(show, value)

    def show(value: Value) -> None:
        if isinstance(worker.data, Store):  # another plugin's meanwhile
            worker.data.moved(value)

    def unwrap() -> MutableMapping[Any, Any]:
        spill.stop()
        return store if worker.status is Status.closing else store.give_back()

    def release() -> None:
        """Release what finished work has read; after the end, while tasks run or it is read."""
        state = worker.state
        if release_held() or store.open or state.executing or state.long_running:
            worker.loop.call_later(_RELEASE_S, release)

    copies = Copies(options.replica_limit, traffic, is_alone_on)
    spill = Spill(
        worker,
        {device: limit_nbytes(device, options.device_memory_limit) for device in devices},
        copies,
        worker.data.spill if isinstance(worker.data, Store) else None,
        moved=moved,
        on_copy=traffic.on_copy,
        on_failure=on_failure,
    )
    store = Store(worker.data, spill, moves_inputs=options.move_inputs)
    try:
        with replaced_data(worker, store, unwrap), told_after(worker, "free-keys", store.freed):
            spill.start()
            release()
            yield store
    finally:
        store.open = False
        spill.stop()
        copies.close()
