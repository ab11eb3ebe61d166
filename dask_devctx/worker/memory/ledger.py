"""The books of one device's memory, and the order in which values leave it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.blocks import Memory
from dask_devctx.worker.memory.kept import Kept

# Values leave ahead when more than the first fraction of the limit is used, until the second is.
_START: Final = 0.92
_STOP: Final = 0.86
# Host memory is page-locked ahead from here on.
_PREPARE: Final = 0.5
# Values below this fraction of the limit leave last: they gain little.
_SMALL: Final = 1e-4


class Ledger:
    """The values on one device; use it with the manager's lock held.

    Parameters
    ----------
    device
        The device.
    limit
        Its limit in bytes.
    changed
        Notified when there is something to move, and when it has moved.

    Attributes
    ----------
    held
        The bytes of all allocations of the values; each counts once.
    incoming
        The bytes that are reserved for values on their way here, and for results.
    spilled
        The bytes of values that left this device and are in host memory.
    demand
        The bytes that a waiting thread wants to leave.
    answers
        How often the device's thread has looked at the demand.
    moved_last
        Whether values left at the last look.
    waiting
        How many threads wait for room.
    stuck
        Whether the device's thread waits since nothing could leave when it last looked.
    stopped
        Whether nothing moves away any more.
    """

    def __init__(self, device: Device, limit: int, changed: threading.Condition) -> None:
        self.device = device
        self.limit = limit
        self.changed = changed
        self.prepare = int(limit * _PREPARE)
        self.start = int(limit * _START)
        self.stop = int(limit * _STOP)
        self.held = self.incoming = self.spilled = self.demand = 0
        self.spills = self.spilled_nbytes = self.unspills = self.unspilled_nbytes = 0
        self.spills_for_retries = 0
        self.answers = self.waiting = 0
        self.moved_last = self.stuck = self.stopped = False
        # By the address of an allocation: its size, and the values in it.
        self._blocks: dict[int, tuple[int, list[weakref.ref[Kept]]]] = {}

    def add(self, memory: Memory, kept: Kept) -> None:
        block = self._blocks.get(memory.base)
        if block is None:
            self._blocks[memory.base] = memory.nbytes, [weakref.ref(kept)]
            self.held += memory.nbytes
        else:
            block[1].append(weakref.ref(kept))

    def remove(self, memory: Memory, kept: Kept) -> None:
        self._keep_only(memory, lambda one: one is not None and one is not kept)

    def forget_dead(self, memory: Memory) -> None:
        """Count an allocation off if no value in it is left."""
        self._keep_only(memory, lambda one: one is not None)

    def _keep_only(self, memory: Memory, wanted: Callable[[Kept | None], bool]) -> None:
        block = self._blocks.get(memory.base)
        if block is not None:
            block[1][:] = [ref for ref in block[1] if wanted(ref())]
            if not block[1]:
                del self._blocks[memory.base]
                self.held -= block[0]

    def answer(self, moved: bool) -> None:
        """Wake the threads that wait for room."""
        self.answers += 1
        self.moved_last = moved
        if self.waiting:
            self.changed.notify_all()

    def reasons(self) -> dict[str, int]:
        """Return the bytes of the values that cannot leave now, by reason."""
        found: Counter[str] = Counter()
        for nbytes, refs in self._blocks.values():
            values = [kept for ref in refs if (kept := ref()) is not None]
            if any(kept.pins for kept in values):
                found["in use by running tasks"] += nbytes
            elif kinds := {type(kept.value).__qualname__ for kept in values if kept.stays}:
                found[f"of types that cannot leave ({', '.join(sorted(kinds))})"] += nbytes
        if self.incoming > 0:
            found["reserved for results, and for values on their way here"] = self.incoming
        return dict(found)

    def values(self) -> Iterator[Kept]:
        """Yield the values; one in several allocations may come more than once."""
        for ref in itertools.chain.from_iterable(refs for _, refs in self._blocks.values()):
            kept = ref()
            if kept is not None:
                yield kept

    def group(self, kept: Kept) -> list[Kept]:
        """Return a value and all that share memory with it, directly or through others."""
        group, more = {id(kept): kept}, [kept]
        while more:
            for memory in more.pop().memories:
                block = self._blocks.get(memory.base)
                for ref in block[1] if block is not None else ():
                    one = ref()
                    if one is not None and id(one) not in group:
                        group[id(one)] = one
                        more.append(one)
        return list(group.values())

    def gain(self, group: Iterable[Kept]) -> int:
        """Return the bytes of the allocations of a group."""
        return sum(memory.nbytes for memory in {m for kept in group for m in kept.memories})


def in_order_of_leaving(ledger: Ledger, next_use: Callable[[Hashable], Any]) -> list[Kept]:
    """Return a device's values that may leave, the first to leave first.

    A value that no known task needs leaves before one that is needed, the least recently used
    first. Among those that are needed, the one whose task runs last leaves first. Small values
    leave after all others.
    """
    small = ledger.limit * _SMALL
    idle: list[tuple[bool, int, int, Kept]] = []
    needed: list[tuple[Any, int, Kept]] = []
    for kept in {id(one): one for one in ledger.values()}.values():
        if kept.pins or kept.stays or kept.leaving or kept.is_away:
            continue
        use = next_use(kept.key)
        nbytes = ledger.gain([kept])
        if use is None:
            idle.append((nbytes < small, kept.touched, -nbytes, kept))
        else:
            needed.append((use, kept.touched, kept))
    idle.sort(key=lambda one: one[:3])
    try:
        needed.sort(key=lambda one: one[:2], reverse=True)
    except TypeError:  # priorities of different kinds
        needed.sort(key=lambda one: one[1])
    large = [one[-1] for one in idle if not one[0]]
    return [*large, *(one[-1] for one in needed), *(one[-1] for one in idle if one[0])]
