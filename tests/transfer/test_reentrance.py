"""A user's ``__del__`` that copies an array: the garbage collector may call it at any moment."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dask_devctx import Device, SimulatedArray, to_device
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer import hold, release_held, stamp


def array(device: int) -> SimulatedArray:
    with Device(device):
        return SimulatedArray.asarray([float(device)] * 1000)


@pytest.mark.parametrize("function", ["cuEventQuery", "cuCtxEnablePeerAccess"])
def test_a_copy_during_another_one_waits_for_no_lock(
    machine: SimulatedMachine, function: str
) -> None:
    moved: list[Any] = []
    begun = False

    def at_the_end_of_an_object(*args: object) -> bool:
        nonlocal begun
        if not begun:
            begun = True
            moved.append(to_device(array(2), 3))
            held = array(2)
            after = stamp(held)
            assert after is not None
            hold(after, held)
            release_held()
        return False

    def move() -> None:
        made = array(0)
        after = stamp(made)
        assert after is not None
        hold(after, made)
        moved.append(to_device(made, 1, after=after))
        release_held()

    machine.faults.inject(function, None, times=10**6, when=at_the_end_of_an_object)
    moving = threading.Thread(target=move, daemon=True)
    moving.start()
    moving.join(10)
    assert begun
    assert not moving.is_alive(), "it waits for a lock that it has"
    assert [int(one.get()[-1]) for one in moved] == [2, 0]
    machine.faults.clear()
    assert release_held() == 0
