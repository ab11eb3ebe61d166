"""The history of all workers, collected while somebody reads it.

The first :meth:`DeviceHistory.read` starts to collect the rows of all workers each half a second.
The collection stops five seconds after the last reading. Rows of workers that left stay until newer
rows take their place.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from distributed import Scheduler
from distributed.metrics import time
from tornado.ioloop import PeriodicCallback

from dask_devctx.dask_internals.scheduler import ask
from dask_devctx.scheduler.messages import ACTION, ANSWER_LIMIT, HISTORY, ROUTING, Failure
from dask_devctx.scheduler.rows import KINDS, LONGEST_TEXT, Happened, Incident, Row, Sample

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Row)

_INTERVAL_S: Final = 0.5
# The rows of all workers that are kept, and the samples: five minutes of 32 devices.
_ROWS: Final = 50_000
_SAMPLES: Final = 20_000
# How many workers that left are remembered, with their rows.
_GONE: Final = 100


@cache
def _failures() -> Any:
    """Return the counter on the scheduler's page ``/metrics``; None without Prometheus."""
    with suppress(ImportError):
        from prometheus_client import Counter

        return Counter("dask_devctx_device_failures", "The devices that failed.", ["device"])


class Ring:
    """The latest rows of one kind, numbered from 0; threads may append."""

    def __init__(self, limit: int) -> None:
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self._total = 0
        self._lock = threading.Lock()

    def append(self, row: tuple[Any, ...]) -> None:
        """Add a row; if the ring is full, the first one is dropped."""
        with self._lock:
            self._total += 1
            self._rows.append(row)

    def since(self, number: int, most: int | None = None) -> tuple[list[tuple[Any, ...]], int, int]:
        """Return the rows from a number on, the number of the next row, and how many are lost."""
        with self._lock:
            first = self._total - len(self._rows)
            begin = min(max(number, first), self._total)
            end = self._total if most is None else min(begin + most, self._total)
            rows = list(itertools.islice(self._rows, begin - first, end - first))
        return rows, end, max(begin - number, 0)


class Reading(NamedTuple, Generic[T]):
    """Pairs of a worker's address and a row since a number, and the number for the next reading.

    ``lost`` rows were dropped before this reading. A row that a worker dropped before it was
    collected is not among them: an :class:`~.rows.Incident` ``"lost"`` tells of it.
    """

    rows: list[tuple[str, T]]
    next: int
    lost: int


@dataclass
class KnownWorker:
    """A worker whose history was collected."""

    name: str
    host: str
    epoch: str | None = None
    since: dict[str, int] = field(default_factory=dict)
    devices: dict[str, int] = field(default_factory=dict)  # their ordinals, by UUID


class DeviceHistory:
    """The history of a cluster's devices, collected while somebody reads it.

    Call all methods on the scheduler's event loop. ``addresses`` returns the addresses of the
    workers that have devices.
    """

    def __init__(self, scheduler: Scheduler, addresses: Callable[[], Collection[str]]) -> None:
        self.workers: dict[str, KnownWorker] = {}  # those of all rows, by address
        self._scheduler = scheduler
        self._addresses = addresses
        self._rows = Ring(_ROWS)
        self._samples = Ring(_SAMPLES)
        self.patience_s = 5.0  # the collection goes on so long after the last reading
        self._read_at = 0.0
        self._asking: dict[str, asyncio.Task[bool]] = {}
        self._looking = PeriodicCallback(self._look, _INTERVAL_S * 1000)
        self._failures = _failures()

    @classmethod
    def of(cls, scheduler: Scheduler) -> DeviceHistory | None:
        """Return the history of a scheduler, or None where the plugin is not installed."""
        return getattr(scheduler.plugins.get(ROUTING), "history", None)

    def close(self) -> None:
        """Collect no more."""
        self._looking.stop()
        for task in self._asking.values():
            task.cancel()

    def read(self, since: int = 0) -> Reading[Happened]:
        """Return the rows since a number; collect more of them from now on."""
        self._read_at = time()
        if not self._looking.is_running():
            self._looking.start()
            self._look()
        return self.rows(since)

    def rows(self, since: int = 0) -> Reading[Happened]:
        """Return the rows since a number that were collected already."""
        return self._reading(self._rows, since)

    def samples(self, since: int) -> Reading[Sample]:
        """Return the samples since a number of theirs that were collected already."""
        return self._reading(self._samples, since)

    def _reading(self, ring: Ring, since: int) -> Reading[Any]:
        rows, following, lost = ring.since(since)
        return Reading([row for row in rows if row[0] in self.workers], following, lost)

    async def collect(self) -> list[str]:
        """Collect the rows of all workers once, now; return the addresses of those not heard."""
        if self._asking:  # these answers may be from before
            await asyncio.wait(self._asking.values(), timeout=1)
        self._look_now()
        if asking := dict(self._asking):
            await asyncio.wait(asking.values())
        return [one for one, task in asking.items() if task.cancelled() or not task.result()]

    def left(self, address: str) -> None:
        """Note that a worker left; its rows stay."""
        known = self.workers.pop(address, None)
        if known is None:
            return
        self.workers[address] = known  # at the end: the first ones left first
        gone = [address for address in self.workers if address not in self._scheduler.workers]
        for first in gone[:-_GONE]:
            del self.workers[first]

    def expect(self, uuids: Iterable[str]) -> None:
        """Count the failures of devices from 0: Prometheus needs a sample before the first."""
        for uuid in uuids if self._failures is not None else ():
            self._failures.labels(uuid)

    def failed(self, worker: str, failure: Failure) -> None:
        """Keep the failure of a worker's devices: the worker ends before it is asked."""
        self._known(worker)
        text = str(failure.error)[:LONGEST_TEXT]
        self._keep(worker, Incident(ACTION, time(), failure.error.uuid, text=text))
        if self._failures is not None:
            self._failures.labels(failure.error.uuid).inc()

    def _look(self) -> None:
        if time() - self._read_at > self.patience_s:
            self._looking.stop()
        else:
            self._look_now()

    def _look_now(self) -> None:
        for address in self._addresses():
            if address not in self._asking and address in self._scheduler.workers:
                self._asking[address] = task = asyncio.ensure_future(self._ask(address))
                task.add_done_callback(partial(self._asking.pop, address))

    def _known(self, address: str) -> KnownWorker:
        known = self.workers.get(address)
        if known is None:
            ws = self._scheduler.workers.get(address)
            name, host = (address, "") if ws is None else (str(ws.name), ws.host)
            known = self.workers[address] = KnownWorker(name, host)
        return known

    async def _ask(self, address: str) -> bool:
        known, more = self._known(address), True
        while more:
            try:
                since = {"epoch": known.epoch, "since": known.since}
                answer = await ask(self._scheduler, address, HISTORY, **since)
                more = self._take(address, known, answer)
            except Exception as error:  # it is leaving, or very busy
                logger.debug("no history from %s: %r", address, error)
                return False
        return True

    def _take(self, address: str, known: KnownWorker, answer: Mapping[str, Any]) -> bool:
        """Keep the rows of an answer; return whether the worker has more of them."""
        known.epoch, known.since = answer["epoch"], answer["next"]
        known.devices.update(answer["devices"])
        for kind, rows in answer["rows"].items():
            for row in rows:
                self._keep(address, KINDS[kind](*row))
        if lost := sum(answer["lost"].values()) - answer["lost"]["samples"]:
            text = f"{lost} rows were dropped before they were collected"
            self._keep(address, Incident("lost", time(), text=text, count=lost))
        return any(len(rows) == ANSWER_LIMIT for rows in answer["rows"].values())

    def _keep(self, address: str, row: Row) -> None:
        ring = self._samples if isinstance(row, Sample) else self._rows
        ring.append((address, row))
