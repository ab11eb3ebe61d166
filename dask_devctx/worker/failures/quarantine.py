"""The tasks that run alone: watched ones in their process, those that lack memory on their device.

A watched task may have broken a device before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from dask_devctx.cuda.device import Device
from dask_devctx.worker.failures.suspects import Suspects

# Other tasks wait this long for a watched task, since that task may wait for one of them. In each
# further watched run of the task they wait ten times longer, so that tasks that take long can be
# told apart, too.
_PATIENCE_S: Final = 60.0
_LONGER: Final = 10


class Quarantine:
    """Lets some tasks run one at a time, with no other task of the process or device beside them.

    All devices report a sticky error of one device. So a watched task waits until the tasks that
    run have ended, and tasks that begin wait until it has ended. If a device fails meanwhile, the
    watched task is the one suspect. A task that lacks memory waits for the tasks of its device
    only, and only they wait for it.

    No task waits without end, since a task may wait for another one. A task that secedes from its
    thread gives up its turn, and nobody waits for it. Nobody waits for methods of actors either,
    and they wait for nobody. All others continue when their patience ends. Tasks that then run at
    the same time are suspects together.

    Thread-safe. Only :meth:`wait` blocks.
    """

    def __init__(self, suspects: Suspects, patience_s: float = _PATIENCE_S) -> None:
        self.taken = False
        self._suspects = suspects
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._until: dict[Hashable, float] = {}  # how long others wait for a task with a turn
        self._watched: set[Hashable] = set()
        self._device: dict[Hashable, Device] = {}  # those that are alone on a device only
        self._closed = False

    def turn(
        self,
        key: Hashable,
        run: int,
        check: Callable[[], None],
        device: Device | None = None,
        *,
        alone: bool = False,
    ) -> Iterator[None]:
        """Yield until a task may begin."""
        where = device if alone and not run else None
        run = run or int(alone)
        while not self._has_turn(key, run, device, where):
            check()
            yield
        patience_s = self._patience_s * _LONGER ** (run - 1)
        until = time.monotonic() + patience_s
        while run and not self._closed and self._suspects.others_run(key, where):
            check()
            if time.monotonic() >= until:
                break
            yield
        check()
        if run:
            with self._changed:
                self._until[key] = time.monotonic() + patience_s

    def _has_turn(
        self, key: Hashable, run: int, device: Device | None, where: Device | None
    ) -> bool:
        with self._changed:
            if self.holds_back(key, device):
                return False
            if run:
                patience_s = self._patience_s * _LONGER ** (run - 1)
                self._until[key] = time.monotonic() + patience_s
                if where is None:
                    self._watched.add(key)
                else:
                    self._device[key] = where
                self.taken = True
            return True

    def holds_back(self, key: Hashable, device: Device | None) -> bool:
        """Return whether a task of a device has to wait for one that runs alone."""
        now = time.monotonic()
        others = (
            until
            for one, until in tuple(self._until.items())
            if one != key and self._device.get(one, device) is device
        )
        return not self._closed and any(now < until for until in others)

    def is_alone_on(self, device: Device) -> bool:
        """Return whether a task that lacked memory has a device for itself."""
        return self.taken and device in tuple(self._device.values())

    def wait(self, seconds: float) -> None:
        """Wait until a turn ends, for some seconds at most."""
        with self._changed:
            self._changed.wait(seconds)

    def seceded(self, key: Hashable) -> None:
        """Give a task's turn to the next task, while the first continues."""
        with self._changed:
            if key in self._until:
                self._until[key] = 0.0
                self._changed.notify_all()

    def ended(self, key: Hashable) -> None:
        """Note that a task and its devices' work are done; the task's turn is over."""
        with self._changed:
            self._watched.discard(key)
            self._device.pop(key, None)
            if self._until.pop(key, None) is not None:
                self.taken = bool(self._until)
                self._changed.notify_all()

    def is_watched(self, key: Hashable) -> bool:
        """Return whether a task runs in quarantine."""
        return key in self._watched

    def close(self) -> None:
        """End all waits."""
        self._closed = True
