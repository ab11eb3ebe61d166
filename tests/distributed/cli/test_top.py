"""``dask devctx top``."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from click.testing import CliRunner, Result
from distributed import Client, wait
from distributed.utils_test import poll_for

from dask_devctx import report
from dask_devctx.cli import devctx
from dask_devctx.client.live import moment
from dask_devctx.errors import nbytes_text
from dask_devctx.simulated_array import SimulatedArray
from tests.distributed.commands import dask_command
from tests.distributed.devices import nap, started, submit_on


def run(*arguments: str) -> Result:
    return CliRunner().invoke(devctx, [*arguments], catch_exceptions=False)


@pytest.fixture
def client() -> Iterator[Client]:
    with started(n_workers=2, protocol="tcp") as client:
        yield client


def address_of(client: Client) -> str:
    return str(client.scheduler.address)


def test_the_state_is_printed_once(client: Client) -> None:
    stop = threading.Event()

    def keep_busy() -> None:
        """Let tasks wait for the device all the time, so that there is one whenever top looks."""
        batches: list[Any] = []
        with dask.annotate(device=1):
            while not stop.is_set():
                batches.append(client.map(nap, [0.05] * 10, pure=False))
                wait(batches[-3:-2])

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        time.sleep(1)
        text = run("top", address_of(client), "--once")
    finally:
        stop.set()
        busy.join()
    assert text.exit_code == 0
    head, columns, *lines = text.stdout.splitlines()
    assert head.startswith(f"{address_of(client)}: 4 devices of 2 workers, ")
    assert columns.split()[:4] == ["device", "use", "busy", "tasks/s"]
    assert [line.split()[0] for line in lines] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    names = re.split("  +", columns)
    idle, busy = (dict(zip(names, re.split("  +", lines[n]), strict=True)) for n in (3, 1))
    assert int(busy["done"]) > 0
    assert int(busy["tasks/s"]) > 5
    assert int(busy["busy"].rstrip("%")) > 30
    assert busy["memory used"].endswith(" of 16.0 GiB")
    assert (busy["now"], busy["spilled"]) == ("nap", "0 B")
    assert (idle["done"], idle["tasks/s"], idle["busy"], idle["now"]) == ("0", "0", "0%", "-")


def test_values_on_the_host_are_shown() -> None:
    with started(n_workers=1, devices=[0], device_memory_limit="200 kB", protocol="tcp") as client:
        kept = client.map(nap, [0.0] * 6, pure=False)
        wait(kept)

        def shown() -> bool:  # more may be spilled meanwhile
            top, found = run("top", address_of(client), "--once").stdout, report(client)
            spilled = found.devices[0].memory_spilled
            _, line, *_ = str(found).splitlines()
            return bool(spilled) and nbytes_text(spilled) in top and nbytes_text(spilled) in line

        poll_for(shown, timeout=20)


def test_the_largest_come_first(client: Client) -> None:
    value = submit_on(client, 2, SimulatedArray, (50 << 20,), "u1")
    wait(value)

    def order(*sort: str) -> list[str]:
        lines = run("top", address_of(client), "--once", *sort).stdout.splitlines()
        return [line.split()[0] for line in lines if line.startswith("cuda:")]

    poll_for(lambda: order("--sort", "memory")[0] == "cuda:2", timeout=20)
    assert order() == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_bytes_that_moved_between_workers_are_counted_by_transport(client: Client) -> None:
    value = submit_on(client, 0, SimulatedArray, (1 << 20,), "u1")
    submit_on(client, 2, type, value).result()
    poll_for(lambda: [*moment(client).moved.values()] == [1 << 20], timeout=20)


def test_it_shows_the_state_live_until_ctrl_c(client: Client) -> None:
    with dask_command("devctx", "top", address_of(client), "--interval", "0.2") as shown:
        poll_for(lambda: shown.said.count("cuda:3") >= 3, timeout=60)
        shown.process.send_signal(signal.SIGINT)
        assert shown.ends() == 0, shown.said
    *_, last = filter(None, shown.said.splitlines())
    assert last.startswith("cuda:")
