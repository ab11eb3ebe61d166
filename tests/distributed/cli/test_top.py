"""``dask devctx top``, and ``dask devctx info`` of a whole cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from click.testing import CliRunner, Result
from distributed import Client, wait
from distributed.utils_test import poll_for

from dask_devctx import Device, report
from dask_devctx.cli import devctx
from dask_devctx.errors import nbytes_text
from tests.distributed.devices import nap, started


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
        found = json.loads(run("top", address_of(client), "--once", "--json").stdout)
        by_tasks = run("top", address_of(client), "--once", "--sort", "tasks").stdout.splitlines()
    finally:
        stop.set()
        busy.join()
    assert text.exit_code == 0
    head, columns, *lines = text.stdout.splitlines()
    assert head.startswith(f"{address_of(client)}: 4 devices of 2 workers, ")
    assert columns.split()[:5] == ["device", "worker", "use", "busy", "tasks/s"]
    assert [line.split()[0] for line in lines] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert max(map(len, text.stdout.splitlines())) <= 120
    assert columns.split()[-1] == "now"
    assert lines[1].split()[-1] == "nap"
    assert by_tasks[2].split()[0] == "cuda:1"
    one = next(device for device in found["devices"] if device["device_id"] == 1)
    assert one["uuid"] == Device(1).uuid
    assert one["done"] > 0
    assert one["tasks_per_s"] > 5
    assert one["occupied"] > 0.3
    assert one["memory"]["total"] == 16 * 2**30
    idle = next(device for device in found["devices"] if device["device_id"] == 3)
    assert (idle["done"], idle["tasks_per_s"], idle["occupied"]) == (0, 0, 0)


def test_values_on_the_host_are_shown_with_the_limit() -> None:
    with started(n_workers=1, devices=[0], device_memory_limit="200 kB", protocol="tcp") as client:
        kept = client.map(nap, [0.0] * 6, pure=False)
        wait(kept)
        once = "top", address_of(client), "--once"
        poll_for(lambda: "on the host" in run(*once).stdout, timeout=20)
        text = run(*once).stdout
        *_, head, line = text.splitlines()
        assert "kept of limit" in head
        assert " of 195.3 KiB" in line
        assert not line.rstrip().endswith(" 0 B")
        (row,) = report(client).devices
        head, line, *_ = str(report(client)).splitlines()
        assert "kept of limit" in head
        assert len(head) <= 100
        assert " of 195.3 KiB" in line
        assert line.endswith(nbytes_text(row.memory_spilled))


@pytest.mark.parametrize("columns", ["80", "120"])
def test_it_shows_the_state_live_until_ctrl_c(client: Client, columns: str) -> None:
    """Also in a terminal of the usual 80 columns: there the names were cut to ``cud…``."""
    command = [sys.executable, "-m", "dask", "devctx", "top", address_of(client)]
    shown = subprocess.Popen(
        [*command, "--interval", "0.2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": columns, "TERM": "xterm", "FORCE_COLOR": "1"},
    )
    seen = ""
    timer = threading.Timer(60, shown.kill)
    timer.start()
    while seen.count("cuda:3") < 3:
        line = shown.stdout.readline()
        assert line, shown.communicate()[1]
        seen += line
    shown.send_signal(signal.SIGINT)
    _, errors = shown.communicate()
    timer.cancel()
    assert (shown.returncode, errors) == (0, "")


# -- info


def test_the_gpus_of_a_cluster(client: Client) -> None:
    result = run("info", address_of(client))
    assert result.exit_code == 0
    head, *lines = result.stdout.splitlines()
    assert head == "Host 127.0.0.1"
    uses = [
        line.partition(" uses ")[2].partition(";")[0]
        for line in lines
        if line.startswith("worker ")
    ]
    assert sorted(", ".join(uses).split(", ")) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert result.stdout.count("4 simulated devices") == 1
    assert sum(line.startswith("cuda:2 ") and Device(2).uuid in line for line in lines) == 1
    found = json.loads(run("info", address_of(client), "--json").stdout)
    assert len(found) == 2
    used = sorted(uuid for worker in found.values() for uuid in worker["uses"])
    assert used == sorted(Device(n).uuid for n in range(4))
