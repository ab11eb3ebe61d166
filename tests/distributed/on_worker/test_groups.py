"""The choice of several devices for one task."""

from __future__ import annotations

from typing import Any

import pytest

from dask_devctx import Device
from dask_devctx.cuda.inspection import link_rank
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.placement.policy import Candidate, choose_group

GIB = 2**30


def candidates(*busy_s: float) -> list[Candidate]:
    return [
        Candidate(Device(n), queued=int(s > 0), busy_s=s, move_nbytes=0, since=n)
        for n, s in enumerate(busy_s)
    ]


def chosen(count: int, *busy_s: float, inputs: Any = (), rank: Any = lambda a, b: 0) -> list[int]:
    group = choose_group(candidates(*busy_s), count, inputs, rank)
    return [device.device_id for device in group]


def pairs(a: Device, b: Device) -> int:
    """NVLink joins 0 and 1, and 2 and 3."""
    return int(a.device_id // 2 != b.device_id // 2)


def test_those_that_are_free_soonest() -> None:
    assert chosen(2, 3, 0, 2, 1) == [1, 3]
    assert chosen(3, 3, 0, 2, 1) == [1, 2, 3]


def test_linked_devices_are_worth_a_short_wait() -> None:
    assert chosen(2, 0, 0.5, 0, 0.9, rank=pairs) == [0, 1]
    assert chosen(2, 0, 5, 0, 9, rank=pairs) == [0, 2]


@pytest.mark.parametrize("have", [[2, 3], [3, 1]])
def test_those_that_hold_the_inputs(have: list[int]) -> None:
    places = {Device(n): (n + 1) * GIB for n in have}
    group = chosen(2, 0, 0, 0, 0, inputs=[(places, frozenset())])
    assert group == sorted(have, reverse=True)  # the most bytes come first
    far = chosen(2, 0, 0, 10, 10, inputs=[(places, frozenset())])
    assert far == ([0, 1] if have == [2, 3] else [1, 0])


def test_many_devices_take_little_time() -> None:
    names: list[Any] = [f"device {n}" for n in range(64)]
    many = [Candidate(name, 0, float(n % 7), 0, n) for n, name in enumerate(names)]
    asked = []

    def rank(a: Device, b: Device) -> int:
        asked.append(1)
        return 0

    assert len(set(choose_group(many, 8, [], rank))) == 8
    assert len(asked) < 20_000


def test_the_driver_ranks_the_links(machine: SimulatedMachine) -> None:
    for n, gpu in enumerate(machine.gpus):
        gpu.nvlinks = frozenset({n ^ 1})
    machine.gpus[3].peers = frozenset({2})
    assert link_rank(Device(0), Device(1)) == 0
    assert link_rank(Device(1), Device(2)) == 1
    assert link_rank(Device(3), Device(0)) > 1
    assert machine.faults.calls["cuCtxCreate"] == 0
