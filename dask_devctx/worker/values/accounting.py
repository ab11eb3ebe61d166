"""The bytes of the values on each device, beside its limit."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from dask.utils import parse_bytes

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.location import Memory, memories, memory_of
from dask_devctx.worker.values.value import AWAY, Entry, Value

_AUTO: Final = 0.8
# Values below this fraction of the limit are spilled last: they gain little.
_SMALL: Final = 1e-4
# The objects of a value whose allocations are looked up: the worker's event loop may do it.
_AT_MOST: Final = 5_000

# Uses, and allocations whose address is not known. All workers of a process count on.
numbers = itertools.count(1)


def limit_nbytes(device: Device, limit: float | str | None) -> int | None:
    """Return the bytes of a limit on a device: a fraction, bytes or "auto"; None for no limit."""
    if limit is None:
        return None
    total = device.info.total_memory or device.memory_info.total
    if limit == "auto":
        limit = _AUTO
    if isinstance(limit, str):  # a few bytes, with their unit
        return min(int(parse_bytes(limit)), total)
    return int(limit * total) if limit <= 1 else min(int(limit), total)


@dataclass
class Counts:
    """The limit of a device, its bytes, and its moves since the start."""

    limit: int | None
    held: int = 0  # by all allocations of the values; each counts once
    spilled: int = 0  # bytes of values that left the device and are in host memory
    spills: int = 0
    spilled_nbytes: int = 0
    unspills: int = 0
    unspilled_nbytes: int = 0


class Account:
    """One device: its counts and the values there; guarded by the lock."""

    def __init__(self, device: Device, limit: int | None, lock: threading.RLock) -> None:
        self.device = device
        self.counts = Counts(limit)
        self.limit = math.inf if limit is None else limit
        self.small = self.limit * _SMALL  # bytes of a value that frees little
        self.changed = threading.Condition(lock)  # something is to be spilled, or was
        self.reserved = 0  # for results, and for values on their way here
        self.spilling = threading.Lock()  # held by the thread that spills its values
        self.failed = False  # whether the device failed: nothing is spilled any more
        self.blocks: dict[Memory, list[Entry]] = {}  # the values in each allocation

    @property
    def used(self) -> int:
        """The bytes of the values that are here or will be."""
        return self.counts.held + self.reserved

    def reasons(self) -> dict[str, int]:
        """Return the bytes of the values that cannot be spilled now, by reason."""
        found: Counter[str] = Counter()
        with self.changed:
            blocks = [(memory, [*living(some)]) for memory, some in self.blocks.items()]
        for memory, values in blocks:
            if any(value.pins for value in values):
                found["in use by running tasks"] += memory.nbytes
            elif kinds := {type(one.value).__qualname__ for one in values if one.stays}:
                found[f"of types that cannot leave ({', '.join(sorted(kinds))})"] += memory.nbytes
        if self.reserved > 0:
            found["reserved for results, and for values on their way here"] = self.reserved
        return dict(found)

    def values(self) -> dict[Value, None]:
        """Return the values, each once."""
        return dict.fromkeys(living(chain.from_iterable(self.blocks.values())))


def living(entries: Iterable[Entry]) -> Iterator[Value]:
    return (value for entry in entries if (value := entry()) is not None)


class Accounts(dict[Device, Account]):
    """The accounts of a worker's devices. Use them with the lock held."""

    def __init__(self, limits: Mapping[Device, int | None], lock: threading.RLock) -> None:
        super().__init__((one, Account(one, limit, lock)) for one, limit in limits.items())
        self._lock = lock
        self.ended: deque[Entry] = deque()  # values whose bytes are still counted

    def __missing__(self, device: Device) -> Account:
        """Return an account for a task of another plugin's device; nothing there is counted."""
        return Account(device, None, self._lock)

    def count(self, value: Value, under: frozenset[Memory] = frozenset()) -> None:
        """Count a value where it is now: in host memory, or on devices in these allocations."""
        if self.ended:
            self.settle()
        entry = value.entry
        if entry is None:
            entry = value.entry = Entry(value, self.ended.append)
        else:
            self._count_off(entry)
        entry.away, entry.memories = None, under
        value.touched = next(numbers)
        for memory in under:
            if (account := self.get(memory.device)) is not None:
                if not (entries := account.blocks.setdefault(memory, [])):
                    account.counts.held += memory.nbytes
                entries.append(entry)
        if value.value is AWAY and (form := value.form) is not None and form.home in self:
            entry.away = form.home, form.nbytes
            self[form.home].counts.spilled += form.nbytes

    def counted(self, memory: Memory, whole: Any) -> Value | None:
        """Return the value that an object in an allocation is counted as, if it is."""
        with self._lock:
            found = living(self[memory.device].blocks.get(memory, ()))
            return next((value for value in found if value.value is whole), None)

    def settle(self) -> None:
        """Count off the values that ended."""
        while self.ended:
            self._count_off(self.ended.popleft())

    def _count_off(self, entry: Entry) -> None:
        if entry.away is not None:
            home, nbytes = entry.away
            self[home].counts.spilled -= nbytes
            entry.away = None
        for memory in entry.memories:
            if (account := self.get(memory.device)) is not None:
                entries = account.blocks[memory]
                entries.remove(entry)
                if not entries:
                    del account.blocks[memory]
                    account.counts.held -= memory.nbytes
        entry.memories = frozenset()


def allocations(value: Any, nbytes: Mapping[Device, int]) -> frozenset[Memory]:
    """Return the allocations under a value; where they are not known, its bytes on each device."""
    one_array = memory_of.find(value.__class__)
    try:
        if one_array is not None and (memory := one_array(value)) is not None and memory.base:
            return frozenset((memory,))
        found = memories(value, _AT_MOST)
    except Exception:
        found = None
    if found is None:
        found = {Memory(device, 0, size) for device, size in nbytes.items()}
    for one in [*found]:
        if not one.base:  # without an address, it is nobody else's
            found.remove(one)
            found.add(one._replace(base=-next(numbers)))
    return frozenset(found)
