"""Simulated devices to break, a monitor, and nothing that stays behind after a test."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator

import dask
import pytest
from distributed import Client

from dask_devctx import DeviceFailedError
from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed.conftest import on_simulated_devices as on_simulated_devices
from tests.distributed.conftest import simulation as simulation
from tests.distributed.devices import plugin_threads, started
from tests.distributed.peers import poison


@pytest.fixture(autouse=True)
def no_device_thread_and_no_file_left(machine: SimulatedMachine) -> Iterator[None]:
    """No thread of a device and no open file stays: a lock is an open file."""
    files = _open_files()
    yield
    deadline = time.monotonic() + 5
    while (left := plugin_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    gc.collect()
    # Logging's and asyncio's own may stay, and a closing cluster's connections for a moment.
    while len(_open_files()) > len(files) + 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(_open_files()) <= len(files) + 8, sorted(set(_open_files()) - set(files))


def _open_files() -> list[str]:
    """The files and sockets that are open; not the devices', which a driver opens for good."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:") or (name[0] == "/" and not name.startswith("/dev/")):
                found.append(name)
    return found


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a cluster in this process; a parameter has the plugin's options."""
    with started(**getattr(request, "param", {})) as client:
        yield client


@pytest.fixture
def apart(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a cluster whose worker is a process; a parameter has the plugin's options."""
    options = getattr(request, "param", {})
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 2}),
        started(n_workers=1, silence_logs=False, processes=True, **options) as client,
    ):
        yield client


def failures(client: Client) -> list[DeviceFailedError]:
    """Return the errors of the devices that failed, by dask's events."""
    events = [event for _, event in client.get_events("devctx")]
    return [DeviceFailedError(*event["fields"]) for event in events if "fields" in event]


def where_slowly(number: int, seconds: float = 0.02) -> tuple[int, int]:
    time.sleep(seconds)
    return number, os.getpid()


def leave_a_bad_kernel_running(after_s: float) -> str:
    poison(after_s)
    return "looks good"
