"""dask's own scheduler with its dashboard, and a process of stand-ins for busy workers.

The stand-ins answer the scheduler's questions with the history that workers keep, send heartbeats,
and look at the page as a browser does: through its websocket, and without drawing it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from distributed import Scheduler
from distributed.core import Server, rpc
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

from benchmarks.subjects.scale_hosted import METRICS, StandInComm
from dask_devctx.scheduler.history import HISTORY, DeviceHistory
from dask_devctx.scheduler.messages import ANNOUNCE, PROTOCOL
from dask_devctx.scheduler.routing import DeviceRouting
from dask_devctx.scheduler.rows import METRIC, DeviceCounts
from dask_devctx.worker.metrics.history import History

_HEARTBEAT_S = 0.5
# How often the stand-ins write down the tasks that ended.
_STEP_S = 0.05
# A copy for each so many tasks.
_COPY = 4
_PREFIXES = ("load", "transpose", "sum-partial", "sum-aggregate", "getitem", "matmul")


@contextlib.contextmanager
def page(n_workers: int, n_devices: int, tasks_per_s: int, settle_s: float) -> Iterator[Page]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(awaitable: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(awaited(), loop).result()

    made = Page(run, settle_s)
    run(made.start())
    arguments = [made.address, made.url, n_workers, n_devices, tasks_per_s]
    made.others = subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        made.ask("ready?")
        yield made
    finally:
        made.others.kill()
        made.others.wait()


class Page:
    """A scheduler with a dashboard, whose process is measured.

    Parameters
    ----------
    run
        Runs a coroutine on the scheduler's event loop.
    settle_s
        How long a page is open, or nobody looks any more, before the measurement begins.
    """

    def __init__(self, run: Callable[[Awaitable[Any]], Any], settle_s: float) -> None:
        self._run, self._settle_s = run, settle_s
        self._connections: set[asyncio.Task[None]] = set()
        self._open = False
        self.others: Any = None
        self.address = self.url = ""

    async def start(self) -> None:
        """Start the scheduler."""
        self._scheduler = await Scheduler(
            host="127.0.0.1", port=0, dashboard=True, dashboard_address="127.0.0.1:0"
        )
        plugin = DeviceRouting()
        await plugin.start(self._scheduler)
        self._scheduler.plugins[DeviceRouting.name] = plugin
        self._scheduler.handlers["stand_in"] = self._join
        self.address = self._scheduler.address
        self.url = f"ws://127.0.0.1:{self._scheduler.http_server.port}/devices"

    async def _join(self, address: str, announcement: dict[str, Any]) -> None:
        comm = StandInComm()
        joining = asyncio.ensure_future(
            self._scheduler.add_worker(
                comm, address=address, status="running", server_id=address, nthreads=64,
                name=address.rpartition(":")[2], resolve_address=False, now=time.time(),
                resources={}, memory_limit=2**40, metrics=METRICS, services={},
                local_directory="", versions={}, nanny="", extra={}, stimulus_id="benchmark",
            )
        )  # fmt: skip
        self._connections.add(joining)
        await comm.joined.wait()
        self._scheduler.handlers[ANNOUNCE](address=address, **announcement)

    def ask(self, line: str) -> None:
        """Ask the other process to do something, and wait until it is done."""
        self.others.stdin.write(f"{line}\n")
        self.others.stdin.flush()
        answer = self.others.stdout.readline()
        if answer != "done\n":
            raise RuntimeError(f"the stand-ins said {answer!r} to {line!r}")

    def _settle(self, looking: bool) -> None:
        time.sleep(self._settle_s)
        history = DeviceHistory.of(self._scheduler)
        deadline = time.monotonic() + 10 * self._settle_s
        # Bokeh keeps a page that was closed for some seconds, in case that it comes back.
        while not looking and history._looking.is_running() and time.monotonic() < deadline:
            time.sleep(0.1)

    def cpu(self, looking: bool, seconds: float) -> float:
        """Return the seconds of CPU time for each second, with a page that is open or without."""
        if looking is not self._open:
            self.ask("open" if looking else "close")
            self._open = looking
            self._settle(looking)
        if looking:
            self.ask("drawn?")
        used, passed = time.process_time(), time.monotonic()
        time.sleep(seconds)
        used, passed = time.process_time() - used, time.monotonic() - passed
        if looking:
            self.ask("drawn?")
        return used / passed


# -- the other process


class _StandIn:
    """A worker whose devices are busy, as far as its history and its heartbeats tell."""

    def __init__(self, number: int, n_devices: int, tasks_per_s: float) -> None:
        self.uuids = [f"GPU-{number:08x}-0000-0000-0000-{n:012x}" for n in range(n_devices)]
        self._rate, self._count = tasks_per_s, itertools.count()
        self._history = History(10_000, [_Device(u, n) for n, u in enumerate(self.uuids)])  # type: ignore[misc]
        self._server = Server({HISTORY: self._history.answer})
        self._done = 0

    async def start(self, scheduler: Any) -> None:
        await self._server.listen("tcp://127.0.0.1:0")
        seen = [(uuid, None) for uuid in self.uuids]
        announcement = {"seen": seen, "used": dict.fromkeys(self.uuids, 2**34)}
        await scheduler.stand_in(
            address=self._server.address, announcement={**announcement, "protocol": PROTOCOL}
        )

    def work(self, since: float, now: float) -> None:
        """Write down the tasks that ended in a stretch of time."""
        n = max(round((now - since) * self._rate), 1)
        took = len(self.uuids) * (now - since) / n * 0.9
        for step in range(n):
            number = next(self._count)
            device = number % len(self.uuids)
            stop = since + (now - since) * (step + 1) / n
            prefix = _PREFIXES[number // 50 % len(_PREFIXES)]
            key = (f"{prefix}-{number // 5000:032x}", number % 71, number % 73)
            self._history.tasks.append(
                (key, prefix, self.uuids[device], device, stop - took, stop, "memory", 1e-3, 1e-4,
                 0.0, device)
            )  # fmt: skip
            if number % _COPY == 0:
                source = self.uuids[device - 1]
                self._history.copied(source, self.uuids[device], 8 << 20, 1e-3, "peer")
            if number % 1000 == 0:
                self._history.happened("out-of-memory", self.uuids[0], key, "too large")
        self._done += n

    async def heartbeat(self, scheduler: Any) -> None:
        """Tell the scheduler how it is."""
        now, rows = time.time(), []
        for n, uuid in enumerate(self.uuids):
            wave = (self._done // 100 + n) % 10 / 10
            memory = {"free": int((90 - 30 * wave) * 2**30), "total": 140 << 30}
            memory |= {"held": int((20 + 30 * wave) * 2**30), "copies": 5 << 30, "spilled": 1 << 30}
            row = DeviceCounts(
                n, uuid, "stand-in", 3, 1, done=self._done, busy_s=now % 1e5, occupied_s=now % 1e5,
                utilization=wave, bandwidth=wave / 2, device_memory_limit=112 << 30,
                **{f"memory_{kind}": nbytes for kind, nbytes in memory.items()},
            )  # fmt: skip
            rows.append(asdict(row))
            self._history.samples.append((*astuple(row), now))
        traffic = [
            {"source": self.uuids[n - 1], "destination": uuid, "transport": "peer", "saved": 0,
             "nbytes": self._done << 20, "copies": self._done // _COPY}
            for n, uuid in enumerate(self.uuids)
        ]  # fmt: skip
        await scheduler.heartbeat_worker(
            address=self._server.address,
            resolve_address=False,
            now=now,
            metrics={**METRICS, METRIC: rows, "devctx-traffic": traffic},
            executing={},
        )


class _Device:
    def __init__(self, uuid: str, device_id: int) -> None:
        self.uuid, self.device_id, self.name = uuid, device_id, "stand-in"


class _Looking:
    """Looks at a page as a browser does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._socket: Any = None
        self._frames = 0
        self._reading: Any = None

    async def open(self) -> None:
        """Load the page, open its websocket and ask for its document."""
        from bokeh.protocol import Protocol

        html = (await AsyncHTTPClient().fetch(self._url.replace("ws:", "http:"))).body.decode()
        found = re.search(r'"token":"([^"]+)"', html)
        assert found is not None, html
        self._socket = await websocket_connect(
            f"{self._url}/ws", subprotocols=["bokeh", found[1]], max_message_size=2**30
        )
        await self._socket.read_message()  # the server is ready
        self._reading = asyncio.ensure_future(self._read())
        message = Protocol().create("PULL-DOC-REQ")
        for part in (message.header_json, message.metadata_json, message.content_json):
            await self._socket.write_message(part)
        await self.drawn()

    async def _read(self) -> None:
        while await self._socket.read_message() is not None:
            self._frames += 1

    async def drawn(self) -> None:
        """Wait for news of the page."""
        before, deadline = self._frames, time.monotonic() + 20
        while self._frames < before + 3:
            assert time.monotonic() < deadline, "the page has no news"
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Leave the page."""
        self._socket.close()
        await self._reading


async def _stand_in(address: str, url: str, n_workers: int, n_devices: int, rate: int) -> None:
    scheduler = rpc(address)
    workers = [_StandIn(n, n_devices, rate / n_workers) for n in range(n_workers)]
    for worker in workers:
        await worker.start(scheduler)

    async def work() -> None:
        since = time.time()
        while True:
            await asyncio.sleep(_STEP_S)
            now = time.time()
            for worker in workers:
                worker.work(since, now)
            since = now

    async def beat() -> None:
        while True:
            for worker in workers:
                await worker.heartbeat(scheduler)
            await asyncio.sleep(_HEARTBEAT_S)

    running = [asyncio.ensure_future(work()), asyncio.ensure_future(beat())]
    looking = _Looking(url)
    acts = {"open": looking.open, "close": looking.close, "drawn?": looking.drawn}
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        for one in running:
            if one.done():
                one.result()
        if line in acts:
            await acts[line]()
        print("done", flush=True)


if __name__ == "__main__":
    at, shown, *counts = sys.argv[1:]
    asyncio.run(_stand_in(at, shown, *map(int, counts)))
