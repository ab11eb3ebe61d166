"""Buffers of other processes: opened once, and closed when nobody reads them any more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dask_devctx import Device
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer.ipc.messages import Place
from dask_devctx.transfer.ipc.receiving import OpenedBuffers


def opened_and_closed(machine: SimulatedMachine) -> tuple[int, int]:
    calls = machine.faults.calls
    return calls["cuIpcOpenMemHandle"], calls["cuIpcCloseMemHandle"]


_EXPORTS = """
from dask_devctx import Device
with Device(0) as device:
    work = device._backend.calls.work
    print(work.ipc_export(work.allocate(1000)).hex(), flush=True)
    input()
"""


@pytest.fixture
def shown(machine: SimulatedMachine) -> Iterator[bytes]:
    """The handle of another process's memory."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _EXPORTS], **pipes) as child:
        assert child.stdout is not None
        yield bytes.fromhex(child.stdout.readline())
        child.communicate("\n")


@pytest.mark.parametrize("numbers", [None, [1]], ids=["its process is gone", "its owner asks"])
def test_a_buffer_is_closed_while_it_is_opened(
    machine: SimulatedMachine, shown: bytes, numbers: list[int] | None
) -> None:
    buffers = OpenedBuffers()
    answers = []

    def close(*args: object) -> bool:
        answers.append(buffers.close("peer", numbers))
        return False

    with Device(0) as device:
        machine.faults.inject("cuIpcOpenMemHandle", None, when=close)
        opened = buffers.begin("peer", Place(1, shown, 0, 1000), device)
        assert answers == [False]  # it is about to be read
        assert opened_and_closed(machine) == (1, 0)
        buffers.end(opened)
        assert opened_and_closed(machine) == (1, 1)
        assert not buffers.has("peer", 1, device)
