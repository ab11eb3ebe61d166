"""Clusters of a worker for each simulated device, and what their tasks do."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from typing import Any

import dask
from cuda.bindings.driver import CUresult
from distributed import Client, Worker, wait

from dask_devctx import Device, LocalDeviceCluster, SimulatedArray, driver
from tests.distributed.starting import forked_workers


@contextlib.contextmanager
def cluster(n_workers: int = 2, **kwargs: Any) -> Iterator[tuple[Client, list[str]]]:
    """A cluster with processes, and its workers' addresses, that of the first device first."""
    kwargs = {"devices_per_worker": 1, **kwargs}
    with (
        forked_workers(),
        LocalDeviceCluster(n_workers=n_workers, dashboard_address=":0", **kwargs) as started,
        Client(started) as client,
    ):
        client.wait_for_workers(n_workers, timeout=60)
        devices = client.run(first_device)
        yield client, sorted(devices, key=devices.__getitem__)


def first_device(dask_worker: Worker) -> int:
    device = dask_worker.plugins["devctx"].worker_devices[0]
    return int(device.device_id)


def transfers(dask_worker: Worker) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in dask_worker.metrics["devctx-traffic"](dask_worker):
        found[row["transport"]] += row["copies"]
    return dict(found)


def staged(dask_worker: Worker) -> int:
    """How many bytes of staging memory hold something that is on its way."""
    return int(dask_worker.plugins["devctx"].extension.peers.in_use)


def nothing_staged(client: Client, within_s: float = 20.0) -> bool:
    return until(lambda: not any(client.run(staged).values()), within_s)


def ways(client: Client) -> dict[str, int]:
    found: Counter[str] = Counter()
    for counted in client.run(transfers).values():
        found.update(counted)
    return dict(found)


def send(client: Client, value: Any, function: Any, workers: list[str], timeout: float = 30) -> Any:
    """Make a value on the first worker, and return what a function says of it on the second."""
    made = client.submit(value, workers=workers[:1], pure=False)
    wait(made, timeout=timeout)
    return client.submit(function, made, workers=workers[1:2], pure=False).result(timeout=timeout)


# -- what tasks do


def array(n: int = 1000, mark: float = 1.0) -> SimulatedArray:
    made = SimulatedArray((n,))
    made[...] = mark
    return made


def last_on_the_host(value: SimulatedArray) -> float:
    return float(value.get()[-1])


def last(value: SimulatedArray) -> tuple[float, bool]:
    return float(value[-1].item()), value.device is Device.current()


# -- what goes wrong in a worker's process


def is_away(key: str, dask_worker: Worker) -> bool:
    """Whether a value has left its device for host memory."""
    data: Any = dask_worker.data
    return any(value.is_away for value in data.values_of([key]))


def fail(function: str, status: int, times: int = 1) -> None:
    faults().inject(function, CUresult(status), times=times)


def fail_for_good(function: str, status: int) -> None:
    """Let the device fail at the next call of a driver function."""

    def break_first(*args: Any) -> bool:
        faults().poison(CUresult(status))
        return False

    faults().inject(function, None, when=break_first)


def poison(after_s: float = 0) -> None:
    """Break the simulated devices of this process."""
    faults().poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, after_s=after_s)


_log = BufferingHandler(10**6)


def keep_log() -> None:
    logger = logging.getLogger("dask_devctx")
    logger.setLevel(logging.INFO)
    logger.addHandler(_log)


def kept_log() -> list[str]:
    return [record.getMessage() for record in _log.buffer]


def faults() -> Any:
    return driver.backend().machine.faults


def when_paused(client: Client, worker: str, timeout_s: float = 20.0) -> None:
    """Wait until a worker is in a call that :func:`hold` made long."""
    where = {"workers": [worker]}
    assert until(lambda: client.run(os.getenv, "PAUSED", **where)[worker], timeout_s), "not called"


def until(condition: Callable[[], Any], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


_held: list[threading.Event] = []


def hold(function: str, seconds: float = 20.0) -> None:
    """Let the next call of a driver function wait for :func:`go_on`; not for long."""
    go_on, first = threading.Event(), threading.Lock()
    os.environ.pop("PAUSED", None)
    _held.append(go_on)

    def wait_first(*args: Any) -> bool:
        if first.acquire(blocking=False):
            os.environ["PAUSED"] = function
            if not go_on.wait(seconds):
                _held.clear()
        return False

    faults().inject(function, None, times=10**9, when=wait_first)


def go_on() -> bool:
    """Return whether a call is still held, after letting it go: the event loop ran meanwhile."""
    is_held = bool(_held)
    while _held:
        _held.pop().set()
    faults()._planned.clear()
    return is_held


kept: list[Any] = []  # by functions that run on workers


def staging_nbytes(dask_worker: Worker) -> int:
    (found,) = dask_worker.plugins["devctx"].extension.peers.stagings.values()
    return int(found.nbytes)


async def given_back(dask_worker: Worker, unused_s: float | None = None) -> int:
    """Free staging memory, at once or as if it was unused for so long; return what stays."""
    transfers = dask_worker.plugins["devctx"].extension.peers
    for staging in transfers.stagings.values():
        staging.used_at -= unused_s or 0
    await (transfers.give_back() if unused_s is None else transfers.give_back_unused())
    return staging_nbytes(dask_worker)


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    keys = {f"devctx.{key.replace('_', '-')}": value for key, value in settings.items()}
    with dask.config.set(keys):
        yield
