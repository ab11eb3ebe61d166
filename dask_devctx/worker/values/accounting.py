"""What the values on each device take of its limit, and the order in which they are spilled."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.location import Memory, memories
from dask_devctx.worker.values.value import Counts, Entry, Value

# Values are spilled when more than the first fraction of the limit is used, until the second is.
_START: Final = 0.92
_STOP: Final = 0.86
# Host memory is page-locked ahead from here on.
_PREPARE: Final = 0.5
# Values below this fraction of the limit are spilled last: they gain little.
_SMALL: Final = 1e-4
# The objects of a value whose allocations are looked up: the worker's event loop does it.
_AT_MOST: Final = 5_000

# Uses, and allocations whose address is not known. All workers of a process count on.
numbers = itertools.count(1)


class Account:
    """One device: its counts, the values there, and who waits for room; guarded by the lock."""

    def __init__(self, device: Device, limit: int, lock: threading.RLock) -> None:
        self.device = device
        self.counts = Counts(limit)
        self.changed = threading.Condition(lock)  # something is to be spilled, or was
        self.prepare = int(limit * _PREPARE)
        self.start = int(limit * _START)
        self.stop = int(limit * _STOP)
        self.reserved = 0  # for results, and for values on their way here
        self.demand = 0  # the bytes that waiting threads want to be spilled
        self.waiting = 0  # how many threads wait for room
        self.answers = 0  # how often the device's thread has looked at the demand
        self.moved_last = False  # whether it spilled anything at the last look
        self.stuck = False  # whether it waits since nothing could be spilled
        self.stopped = False  # whether nothing is spilled any more
        # By the address of an allocation: its size, and the values in it.
        self._blocks: dict[int, tuple[int, list[Entry]]] = {}

    @property
    def used(self) -> int:
        """The bytes of the values that are here or will be."""
        return self.counts.held + self.reserved

    def add(self, memory: Memory, entry: Entry) -> None:
        block = self._blocks.get(memory.base)
        if block is None:
            self._blocks[memory.base] = memory.nbytes, [entry]
            self.counts.held += memory.nbytes
        else:
            block[1].append(entry)

    def remove(self, memory: Memory, entry: Entry) -> None:
        block = self._blocks.get(memory.base)
        if block is not None and entry in block[1]:
            block[1].remove(entry)
            if not block[1]:
                del self._blocks[memory.base]
                self.counts.held -= block[0]

    def answer(self, moved: bool) -> None:
        """Wake the threads that wait for room."""
        self.answers += 1
        self.moved_last = moved
        if self.waiting:
            self.changed.notify_all()

    def reasons(self) -> dict[str, int]:
        """Return the bytes of the values that cannot be spilled now, by reason."""
        found: Counter[str] = Counter()
        for nbytes, entries in self._blocks.values():
            values = [value for entry in entries if (value := entry()) is not None]
            if any(value.pins for value in values):
                found["in use by running tasks"] += nbytes
            elif kinds := {type(one.value).__qualname__ for one in values if one.stays}:
                found[f"of types that cannot leave ({', '.join(sorted(kinds))})"] += nbytes
        if self.reserved > 0:
            found["reserved for results, and for values on their way here"] = self.reserved
        return dict(found)

    def values(self) -> Iterator[Value]:
        """Yield the values; one in several allocations may come more than once."""
        for entry in itertools.chain.from_iterable(entries for _, entries in self._blocks.values()):
            value = entry()
            if value is not None:
                yield value

    def group(self, value: Value) -> list[Value]:
        """Return a value and all that share memory with it, directly or through others."""
        group, more = {id(value): value}, [value]
        while more:
            entry = more.pop().entry
            for memory in () if entry is None else entry.memories:
                block = self._blocks.get(memory.base)
                for other in block[1] if block is not None else ():
                    one = other()
                    if one is not None and id(one) not in group:
                        group[id(one)] = one
                        more.append(one)
        return list(group.values())

    def in_order(self, next_use: Callable[[Hashable], Any]) -> list[Value]:
        """Return the values that may be spilled, in order.

        First those that no known task needs, the least recently used first; then those whose task
        runs last. Small values come after all others.
        """
        small = self.counts.limit * _SMALL
        idle: list[tuple[bool, int, int, Value]] = []
        needed: list[tuple[Any, int, Value]] = []
        for value in {id(one): one for one in self.values()}.values():
            if value.pins or value.stays or value.leaving or value.is_away:
                continue
            use = next_use(value.key)
            if use is None:
                nbytes = gain([value])
                idle.append((nbytes < small, value.touched, -nbytes, value))
            else:
                needed.append((use, value.touched, value))
        idle.sort(key=lambda one: one[:3])
        try:
            needed.sort(key=lambda one: one[:2], reverse=True)
        except TypeError:  # priorities of different kinds
            needed.sort(key=lambda one: one[1])
        large = [one[-1] for one in idle if not one[0]]
        return [*large, *(one[-1] for one in needed), *(one[-1] for one in idle if one[0])]


def gain(group: Iterable[Value]) -> int:
    """Return the bytes of the allocations of a group."""
    found = {m for value in group if value.entry is not None for m in value.entry.memories}
    return sum(memory.nbytes for memory in found)


class Accounts(dict[Device, Account]):
    """The accounts of a worker's devices; empty without a limit. Use them with the lock held."""

    def __init__(self, limits: Iterable[tuple[Device, int]], lock: threading.RLock) -> None:
        super().__init__((device, Account(device, nbytes, lock)) for device, nbytes in limits)
        self._ended: deque[Entry] = deque()

    def add(self, value: Value, under: frozenset[Memory]) -> None:
        """Count a value that is on its devices, in these allocations."""
        if self._ended:
            self.settle()
        value.touched = next(numbers)
        entry = self._entry(value)
        entry.memories = under
        for memory in under:
            if (account := self.get(memory.device)) is not None:
                account.add(memory, entry)

    def add_away(self, value: Value) -> None:
        """Count a value in host memory, and no longer on its devices."""
        entry, form = self._entry(value), value.form
        assert form is not None
        self._count_off(entry)
        if (account := self.get(form.home)) is not None:
            entry.away = account.counts, form.share
            account.counts.spilled += form.share

    def remove(self, value: Value) -> None:
        """Count a value no longer."""
        if value.entry is not None:
            self._count_off(value.entry)

    def settle(self) -> None:
        """Count off the values that ended."""
        while self._ended:
            self._count_off(self._ended.popleft())

    def _entry(self, value: Value) -> Entry:
        entry = value.entry
        if entry is None:
            entry = value.entry = Entry(value, self._ended.append)
            entry.away, entry.memories = None, frozenset()
        return entry

    def _count_off(self, entry: Entry) -> None:
        if entry.away is not None:
            counts, nbytes = entry.away
            counts.spilled -= nbytes
            entry.away = None
        for memory in entry.memories:
            if (account := self.get(memory.device)) is not None:
                account.remove(memory, entry)
        entry.memories = frozenset()


def allocations(value: Any, nbytes: Mapping[Device, int]) -> frozenset[Memory]:
    """Return the allocations under a value; where they are not known, its bytes on each device."""
    try:
        found = memories(value, _AT_MOST)
    except Exception:
        found = None
    if found is None:
        found = {Memory(device, 0, size) for device, size in nbytes.items()}
    # An allocation without an address is nobody else's.
    for one in [*found]:
        if not one.base:
            found.remove(one)
            found.add(one._replace(base=-next(numbers)))
    return frozenset(found)
