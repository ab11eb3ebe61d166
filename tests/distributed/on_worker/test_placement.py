"""Who goes where: the counting, the policy, and that no queue waits for another."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import dask
import pytest
from distributed import wait
from distributed.utils_test import async_poll_for

from dask_devctx import Device, SimulatedArray, report, task_devices
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.placement.admission import Admission, Claim
from dask_devctx.worker.placement.policy import (
    FULL_NBYTES,
    LINK_BYTES_PER_S,
    Candidate,
    start_soonest,
)
from tests.distributed.devices import claim_of, here, submit_on, with_plugin


def candidate(device: int = 0, **kwargs: Any) -> Candidate:
    defaults = {"queued": 0, "busy_s": 0.0, "move_nbytes": 0, "since": 0}
    return Candidate(Device(device), **{**defaults, **kwargs})


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"busy_s": 0.1, "queued": 5}, {"busy_s": 0.2}),
        ({"queued": 1}, {"queued": 2, "since": 9}),
        ({"since": 3}, {"since": 2}),
        ({"busy_s": 0.1}, {"move_nbytes": int(LINK_BYTES_PER_S)}),
        ({"move_nbytes": 10**6}, {"busy_s": 0.1}),
        ({"busy_s": 60.0, "free_nbytes": 2**33}, {"free_nbytes": FULL_NBYTES - 1}),
        ({"busy_s": 60.0, "free_nbytes": None}, {"free_nbytes": 0}),
        ({"busy_s": 60.0, "free_nbytes": 2**33}, {"free_nbytes": 2**32, "move_nbytes": 2**32}),
        ({"busy_s": 1.0, "free_nbytes": 0}, {"busy_s": 2.0, "free_nbytes": 0}),  # all are full
        # Where the inputs are, although others have less to do; not while one has nothing at all.
        (
            {"queued": 8, "busy_s": 0.008, "waits": True},
            {"queued": 1, "busy_s": 0.001, "waits": True, "moves": 1},
        ),
        ({"moves": 1}, {"queued": 2, "busy_s": 0.002, "waits": True}),
        ({"queued": 3, "moves": 1}, {"queued": 4, "busy_s": 0.002, "waits": True}),
        (
            {"queued": 1, "busy_s": 0.1, "waits": True, "moves": 1},
            {"queued": 8, "busy_s": 0.8, "waits": True},
        ),
        # Those that are about as far from the inputs are told apart by what they have to do.
        (
            {"queued": 1, "busy_s": 0.001, "waits": True, "moves": 3, "move_nbytes": 108},
            {"queued": 3, "busy_s": 0.003, "waits": True, "moves": 3, "move_nbytes": 100},
        ),
    ],
)
def test_start_soonest(better: dict[str, Any], worse: dict[str, Any]) -> None:
    good, bad = candidate(0, **better), candidate(1, **worse)
    assert start_soonest([good, bad]) is good
    assert start_soonest([bad, good]) is good


@with_plugin()
async def test_idle_devices_take_turns(client: Any) -> None:
    assert [await client.submit(here, turn) for turn in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@with_plugin()
async def test_full_devices_come_last(client: Any, machine: SimulatedMachine) -> None:
    for gpu in machine.gpus[:3]:
        gpu.used_memory = gpu.total_memory - 2**20
    assert await client.gather(client.map(here, range(4))) == [3] * 4


gate = threading.Event()


def behind_the_gate(*_: object) -> int | None:
    gate.wait(20)
    return here()


@with_plugin(32)
async def test_durations_are_known_by_prefix(client: Any, worker: Any) -> None:
    gate.clear()
    await submit_on(client, 0, time.sleep, 0.5, key="long-0")
    running = [submit_on(client, 0, behind_the_gate, key="long-1")]
    await submit_on(client, 1, time.sleep, 0.01, key="short-0")
    for device in 3 * (1, 2, 3):
        running.append(submit_on(client, device, behind_the_gate, key=f"short-{len(running)}"))
    await async_poll_for(lambda: worker.state.executing_count == 10, timeout=10)
    # Nine short ones queue elsewhere, three a device, and still end before the long one.
    last = client.submit(behind_the_gate, key="short-last")
    await async_poll_for(lambda: worker.state.executing_count == 11, timeout=10)
    gate.set()
    assert await last != 0
    await client.gather(running)


given_to_policy: list[Sequence[Candidate]] = []


def _last(candidates: Sequence[Candidate]) -> Candidate:
    given_to_policy.append(candidates)
    return candidates[-1]


def spread() -> list[SimulatedArray]:
    made = []
    for nbytes, device in enumerate(task_devices(), start=1):
        with device:
            made.append(SimulatedArray(nbytes, "u1"))
    return made


@with_plugin(32, policy=_last, tasks_per_device=2)
async def test_a_policy_is_given_what_each_device_has_and_lacks(client: Any, worker: Any) -> None:
    """Values on two devices, one spread over both, one on the host; one has a copy."""
    assert await client.gather(client.map(here, range(5))) == [3] * 5
    values = [submit_on(client, 0, SimulatedArray, 10, "u1")]
    with dask.annotate(device=1):
        values += client.map(SimulatedArray, [20, 5], dtype="u1")
    with dask.annotate(devices=[0, 1]):
        values.append(client.submit(spread))
    await submit_on(client, 2, type, values[1])  # which leaves a copy there
    values.append(client.submit(int, 3))
    await wait(values)
    gate.clear()
    with dask.annotate(device=1):
        running = client.map(behind_the_gate, range(2))
    await async_poll_for(lambda: worker.state.executing_count == 2, timeout=10)
    assert await client.submit(here, *values) == 3
    gate.set()
    await client.gather(running)
    seen = given_to_policy[-1]
    assert [c.move_nbytes for c in seen] == [27, 11, 18, 38]
    assert [c.moves for c in seen] == [3, 2, 3, 4]
    assert [c.waits for c in seen] == [False, True, False, False]
    assert [c.queued for c in seen] == [0, 2, 0, 0]
    assert all(c.free_nbytes for c in seen)


def _misspelled(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: one.queud)  # type: ignore[attr-defined]


@with_plugin(policy=_misspelled)
async def test_the_line_of_a_policy_that_raises_is_shown(client: Any) -> None:
    failed = client.submit(here)
    error = await failed.exception()
    assert isinstance(error, AttributeError)
    frames = traceback.extract_tb(await failed.traceback())
    assert frames[0].name == "_misspelled"
    assert "one.queud" in str(frames[-1].line)
    note, place = error.__notes__
    assert note == "It comes from the placement policy _misspelled, policy=..."
    assert place.startswith(f"{failed.key!r} was refused by tcp://")
    assert "AttributeError: 'Candidate' object has no attribute 'queud'" in str(
        await report(client)
    )


def _nothing(candidates: Sequence[Candidate]) -> Any:
    return None


@with_plugin(policy=_nothing)
async def test_a_policy_that_chooses_nothing_is_named(client: Any) -> None:
    with pytest.raises(TypeError, match=r"_nothing.* must return one of the candidates"):
        await client.submit(here)


# -- which waiting task may start


DEVICES = [Device(number) for number in range(4)]
LIMIT = 100


class Line:
    """Claims on four devices, and the names of those that hold."""

    def __init__(self, tasks_per_device: int = 1) -> None:
        self.admission = Admission(DEVICES, tasks_per_device, dict.fromkeys(DEVICES, LIMIT))
        self.held: list[str] = []
        self.claims: dict[str, Claim] = {}

    def submit(self, name: str, *devices: int, priority: int = 1, nbytes: int = 0) -> None:
        group = [DEVICES[number] for number in devices]
        claim = claim_of(self.admission, name, *group, nbytes=nbytes, priority=(priority,))
        self.claims[name] = claim
        claim.granted = lambda: self.held.append(name)
        self.admission.submit(claim)

    def end(self, name: str) -> None:
        self.held.remove(name)
        self.admission.release(self.claims[name])


def test_several_devices_are_reserved_for_the_first_in_line() -> None:
    line = Line()
    line.submit("runs", 0)
    line.submit("both", 0, 1)
    line.submit("later", 1)
    line.submit("elsewhere", 2)
    assert line.held == ["runs", "elsewhere"]
    assert line.admission.waiting_for(DEVICES[1]) == 2
    line.end("runs")
    assert line.held == ["elsewhere", "both"]
    line.end("both")
    assert line.held == ["elsewhere", "later"]
    line.submit("two", 1, 2)
    line.submit("last", 1)
    line.end("later")
    withdrawn = [line.admission.withdraw(line.claims[one]) for one in ("elsewhere", "two", "two")]
    assert withdrawn == [False, True, False], "only what waits"
    assert line.held == ["elsewhere", "last"]


def test_a_claim_that_is_not_first_everywhere_reserves_nothing() -> None:
    line = Line()
    line.submit("runs", 0)
    line.submit("urgent", 0, priority=0)
    line.submit("both", 0, 1)
    line.submit("passes", 1)
    assert line.held == ["runs", "passes"]
    line.end("runs")
    line.submit("behind", 1)  # now the claim is the first on both
    line.end("passes")
    assert line.held == ["urgent"]
    line.end("urgent")
    assert line.held == ["both"]


def test_bytes_are_waited_for_in_turn() -> None:
    line = Line(tasks_per_device=4)
    line.submit("most", 0, nbytes=80)
    line.submit("more", 0, nbytes=40)
    line.submit("small", 0, nbytes=10)
    assert line.held == ["most"]
    line.end("most")
    assert line.held == ["more", "small"]
