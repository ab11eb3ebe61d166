"""The faults that happen to a cluster while it works."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from tests.soak.hosts import Host, Scheduler

# How often each fault happens in a hundred batches.
RATES = {
    "worker killed": 15.0,
    "worker stood still": 10.0,
    "hardware failed": 6.0,
    "device broke, nobody guilty": 6.0,
    "network gone, short": 6.0,
    "network gone, long": 2.0,
    "host killed": 3.0,
    "scheduler restarted": 3.0,
}
# Longer than dask waits for a connection: see SETTINGS in __main__.
LONG_S = 20.0


class Faults:
    """Makes random faults, each on a thread of its own.

    Parameters
    ----------
    seed
        The same seed gives the same faults for the same batch.
    scheduler, hosts
        What fails.
    factor
        How many times as often as usual.

    Attributes
    ----------
    made
        How often each fault happened.
    restarts
        How often the scheduler was restarted.
    """

    def __init__(
        self, seed: int, scheduler: Scheduler, hosts: Sequence[Host], factor: float
    ) -> None:
        self._seed, self._scheduler, self._hosts, self._factor = seed, scheduler, hosts, factor
        self.made: Counter[str] = Counter()
        self._stop = threading.Event()
        self._running: list[threading.Thread] = []

    def begin(self, number: int, seconds: float) -> None:
        """Begin the faults of a batch; they happen within some seconds."""
        chance = random.Random(f"{self._seed} faults {number}")
        for name, rate in RATES.items():
            if chance.random() * 100 < rate * self._factor:
                own = random.Random(chance.random())
                thread = threading.Thread(
                    target=self._make, args=(name, own, chance.random() * seconds), daemon=True
                )
                thread.start()
                self._running.append(thread)

    def close(self) -> None:
        """Begin no more faults, and end those that last."""
        self._stop.set()
        for thread in self._running:
            thread.join()

    def _make(self, name: str, chance: random.Random, after_s: float) -> None:
        if self._stop.wait(after_s):
            return
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
