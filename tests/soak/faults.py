"""The faults that happen to a cluster while it works."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from tests.soak.hosts import Host, Scheduler

# How often each fault happens in an hour.
RATES = {
    "worker killed": 60.0,
    "worker stood still": 40.0,
    "hardware failed": 24.0,
    "device broke, nobody guilty": 24.0,
    "network gone, short": 24.0,
    "network gone, long": 8.0,
    "host killed": 12.0,
    "scheduler restarted": 12.0,
}
# Longer than dask waits for a connection: see SETTINGS in __main__.
LONG_S = 20.0


class Faults:
    """Makes random faults at random moments, each on a thread of its own."""

    def __init__(
        self, seed: int, scheduler: Scheduler, hosts: Sequence[Host], factor: float
    ) -> None:
        self._scheduler, self._hosts = scheduler, hosts
        self._seed, self._factor = seed, factor
        self.made: Counter[str] = Counter()
        self._stop = threading.Event()
        self._running: list[threading.Thread] = []

    def begin(self) -> None:
        """Make faults from now on."""
        if self._factor:
            self._begin(self._go_on, random.Random(f"{self._seed} faults"), self._factor / 3600)

    def _begin(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._running.append(thread)
        thread.start()

    def _go_on(self, chance: random.Random, factor: float) -> None:
        """Make faults until they are stopped."""
        names, rates = list(RATES), list(RATES.values())
        while not self._stop.wait(chance.expovariate(sum(rates) * factor)):
            [name] = chance.choices(names, rates)
            self._begin(self._make, name, random.Random(chance.random()))

    def close(self) -> None:
        """Begin no more faults, and wait for those that last."""
        self._stop.set()
        while self._running:
            self._running.pop().join()

    def _make(self, name: str, chance: random.Random) -> None:
        try:
            happened = self._act(name, chance)
        except Exception as error:
            print(f"{name}: {error!r}", file=sys.stderr)
            return
        if happened:
            self.made[name] += 1

    def _act(self, name: str, chance: random.Random) -> bool:
        host = chance.choice(self._hosts)
        acts: dict[str, Callable[[], object]] = {
            "worker killed": lambda: host.send(chance, signal.SIGKILL),
            "worker stood still": lambda: host.stop_one(chance, 0.5 + 4 * chance.random()),
            "hardware failed": lambda: host.break_devices(chance, signal.SIGUSR1),
            "device broke, nobody guilty": lambda: host.break_devices(chance, signal.SIGUSR2),
            "network gone, short": lambda: host.cut_off(0.2 + 3 * chance.random()),
            "network gone, long": lambda: host.cut_off(LONG_S),
            "host killed": host.kill,
            "scheduler restarted": self._scheduler.kill,
        }
        return acts[name]() is not False
