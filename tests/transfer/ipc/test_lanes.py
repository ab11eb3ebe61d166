"""Streams that only do copies."""

from __future__ import annotations

import threading

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer.ipc import lanes


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuEventCreate"])
def test_a_lane_can_be_had_while_the_driver_waits_for_another(
    machine: SimulatedMachine, function: str
) -> None:
    """Where a stream is full, it may wait for the device. The event loop takes lanes, too."""
    waiting, go_on, taken = threading.Event(), threading.Event(), threading.Event()

    def wait(*_: object) -> bool:
        waiting.set()
        go_on.wait(20)
        return False

    def share() -> None:
        with Device(0):
            lanes.shared(Device(0), "in")

    def take() -> None:
        with Device(0):
            lanes.give(lanes.take(Device(0)))
        taken.set()

    take()
    taken.clear()
    machine.faults.inject(function, CUresult.CUDA_ERROR_UNKNOWN, when=wait)
    threads = [threading.Thread(target=share), threading.Thread(target=take)]
    threads[0].start()
    assert waiting.wait(10)
    threads[1].start()
    in_time = taken.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert in_time
