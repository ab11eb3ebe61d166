"""The queue of a device's calls, from which its threads take the most urgent that may start."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterable
from time import monotonic
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.worker.placement.admission import Admission, Claim
from dask_devctx.worker.placement.occupancy import WHOLE

# The priority of a call that is no task, such as the call with which a thread rejoins its pool.
FIRST: Final[tuple[Any, ...]] = (float("-inf"),)
_LAST: Final[tuple[Any, ...]] = (float("inf"),)


class DeviceQueue(queue.Queue[Any]):
    """A queue of calls, ordered by the smallest priority, then by arrival.

    Parameters
    ----------
    admission
        Decides which calls may start; None if all may.
    device
        The device; None without an admission.

    Notes
    -----
    A plain task's priority ends with its prefix, by which its duration is known. All queues of an
    admission share its lock, so that a decision about several devices is one step.
    """

    def __init__(self, admission: Admission | None = None, device: Device | None = None) -> None:
        super().__init__()
        self._admission = admission
        self._device = device
        if admission is not None and device is not None:
            self.mutex: Any = admission.lock
            self.not_empty = threading.Condition(self.mutex)
            self.not_full = threading.Condition(self.mutex)
            self.all_tasks_done = threading.Condition(self.mutex)
            admission.occupancy.queues[device] = self

    # -- for the threads

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add a call; there is always room."""
        with self.mutex:
            self._put(item)
            self.not_empty.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next call for this thread, whose last call is over."""
        self._ended()
        with self.mutex:
            if self._qsize():
                return self._get()
        return super().get(block, timeout)

    def left(self) -> None:
        """Note that this thread seceded: the rest of its call does not count."""
        self._ended()

    def _ended(self) -> None:
        ident = threading.get_ident()
        if ident in self._running or ident in self._claimed:
            with self.mutex:
                self._running.pop(ident, None)
                claim = self._claimed.pop(ident, None)
                if claim is not None:
                    claim.ended()
                elif self._admission is not None and not self._admission.idle:
                    self._admission.look()

    def put_claimed(self, call: Any, claim: Claim) -> tuple[int, int]:
        """Add a call whose claim was just granted; the lock is held.

        Returns
        -------
        tuple of int
            How many threads the device needs for these calls and the plain tasks that may run
            beside them, and how many calls run or may begin now.
        """
        self._granted.append((call, claim))
        here = [*self._claimed.values(), *(claim for _, claim in self._granted)]
        assert self._admission is not None
        left = WHOLE - sum(claim.share for claim in here if claim.held)
        self.not_empty.notify_all()
        busy = len(here) + len(self._running)
        return len(here) + max(left, 0) // self._admission.occupancy.place, busy

    def give_back(self, priority: tuple[Any, ...]) -> bool:
        """Take a plain task that waits out of the queue; its worker gives it to the scheduler.

        Parameters
        ----------
        priority
            The priority of the task: the object that came with it.
        """
        with self.mutex:
            for entry in self.queue:
                if entry[0] is priority:
                    self.queue.remove(entry)
                    heapq.heapify(self.queue)
                    break
            else:
                return False
        return bool(entry[2].give_back())

    # -- for the admission, with the lock held

    def running(self) -> Iterable[tuple[str, float]]:
        """Return the prefix and the start of each plain task that runs."""
        return self._running.values()

    def first(self) -> tuple[Any, ...] | None:
        """Return the urgency of the most urgent plain task that waits; None if none waits."""
        if not self.queue or len(self.queue[0][0]) < 2:
            return None
        priority: tuple[Any, ...] = self.queue[0][0]
        return priority

    def waiting(self) -> int:
        """Return how many plain tasks wait."""
        return sum(len(priority) > 1 and call is not None for priority, _, call in self.queue)

    def look_again(self) -> None:
        """Let the device's threads look again for a task that they may start."""
        if self.queue:
            self.not_empty.notify_all()

    # -- the parts of a queue.Queue, with the lock held

    def _init(self, maxsize: int) -> None:
        self.queue: Any = []
        self._counter = itertools.count()
        self._granted: deque[tuple[Any, Claim]] = deque()
        # By thread: the plain task that it runs, and the claim of any other.
        self._running: dict[int, tuple[str, float]] = {}
        self._claimed: dict[int, Claim] = {}

    def _qsize(self) -> int:
        admission = self._admission
        if self._granted or not self.queue or admission is None:
            return len(self._granted) + len(self.queue)
        priority, _, call = self.queue[0]
        if call is None and not admission.idle:  # the end: after the claims that still wait
            return 0 if any(c.devices[0] is self._device for c in admission.waiting()) else 1
        if len(priority) < 2:
            return 1
        if admission.idle:  # there may be more threads than places
            return int(len(self._running) < admission.tasks_per_device)
        assert self._device is not None
        return int(admission.may_start_plain(self._device, priority))

    def _put(self, item: Any) -> None:
        priority = _LAST if item is None else item.priority
        heapq.heappush(self.queue, (priority, next(self._counter), item))

    def _get(self) -> Any:
        if self._granted:
            call, claim = self._granted.popleft()
            self._claimed[threading.get_ident()] = claim
            return call
        priority, _, call = heapq.heappop(self.queue)
        if len(priority) > 1:
            self._running[threading.get_ident()] = priority[-1], monotonic()
            if self._admission is not None and not self._admission.idle:
                self._admission.look()
        return call
