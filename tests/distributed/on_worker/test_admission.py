"""Which waiting task may start: a model of all devices, and the promises one by one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_devctx import Device
from dask_devctx.worker.placement import admission as module
from dask_devctx.worker.placement.admission import Admission, Claim
from dask_devctx.worker.placement.occupancy import WHOLE, share_units

DEVICES = 4
LIMIT = 100


class Clock:
    """The time of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0


clock = Clock()


class Queue:
    """A device's plain tasks, each with its urgency; the last entry is the prefix."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.begun: dict[Task, float] = {}

    def running(self) -> list[tuple[str, float]]:
        return [(task.prefix, since) for task, since in self.begun.items()]

    def first(self) -> tuple[Any, ...] | None:
        return min((task.urgency for task in self.tasks), default=None)

    def look_again(self) -> None:
        pass


class Task:
    def __init__(self, number: int, spec: dict[str, Any]) -> None:
        self.number = number
        self.devices: tuple[int, ...] = tuple(spec["devices"])
        self.share: float | None = spec["share"]
        self.nbytes: int = spec["nbytes"]
        self.prefix = f"takes-{spec['seconds']}"
        self.seconds: float = spec["seconds"]
        self.plain = len(self.devices) == 1 and self.share is None and not self.nbytes
        self.urgency = (-spec["priority"], 1, number, self.prefix)
        self.arrived = 0.0
        self.claim: Claim | None = None
        self.ends: float | None = None


class Machine:
    """Devices whose time runs in steps, and the admission that is tested."""

    def __init__(self, tasks_per_device: int, known: bool) -> None:
        self.devices = [Device(n) for n in range(DEVICES)]
        self.durations: dict[str, float] = {}
        self.known = known
        self.places = tasks_per_device
        limits = dict.fromkeys(self.devices, LIMIT)
        self.admission = Admission(self.devices, tasks_per_device, self.durations, limits=limits)
        self.queues = [Queue() for _ in self.devices]
        self.admission.occupancy.queues.update(zip(self.devices, self.queues, strict=True))
        self.running: list[Task] = []
        self.done: list[Task] = []

    def submit(self, task: Task) -> None:
        task.arrived = clock.now
        if task.plain:
            self.queues[task.devices[0]].tasks.append(task)
        else:
            share = share_units(task.share or 1 / self.places)
            devices = [self.devices[n] for n in task.devices]
            by_user, _, *others = task.urgency
            task.claim = Claim(
                *(self.admission, task.number, task.prefix, devices, share, task.nbytes),
                *(task.urgency, (by_user, 0, *others)),
            )
            task.claim.submit(lambda: self.granted(task))
        self.start_plain()

    def granted(self, task: Task) -> None:
        assert task.claim is not None
        if task.claim.held:
            self.begin(task)

    def begin(self, task: Task) -> None:
        task.ends = clock.now + task.seconds
        self.running.append(task)

    def start_plain(self) -> None:
        """As a device's threads do: take the most urgent task, if it may start."""
        changed = True
        while changed:
            changed = False
            for device, queue in zip(self.devices, self.queues, strict=True):
                first = queue.first()
                if first is not None and self.admission.may_start_plain(device, first):
                    task = next(one for one in queue.tasks if one.urgency == first)
                    queue.tasks.remove(task)
                    queue.begun[task] = clock.now
                    self.begin(task)
                    self.admission.look()
                    changed = True
            self.check()

    def check(self) -> None:
        """No device is over its places and bytes, whatever the admission believes."""
        shares: Counter[int] = Counter()
        nbytes: Counter[int] = Counter()
        for task in self.running:
            for n in task.devices:
                shares[n] += share_units(task.share or 1 / self.places)
                nbytes[n] += task.nbytes
        assert all(share <= WHOLE for share in shares.values()), shares
        assert all(n <= LIMIT for n in nbytes.values()), nbytes

    def end(self, task: Task) -> None:
        self.running.remove(task)
        self.done.append(task)
        if self.known:
            self.durations[task.prefix] = task.seconds
        if task.claim is None:
            del self.queues[task.devices[0]].begun[task]
            self.admission.look()
        else:
            task.claim.ended()
        self.start_plain()

    def cancel(self, task: Task) -> None:
        if task in self.done:
            return
        if task in self.running:
            self.end(task)
            return
        if task.claim is not None:
            task.claim.withdraw()
            assert task.claim.void
        else:
            self.queues[task.devices[0]].tasks.remove(task)
        self.done.append(task)
        self.start_plain()

    def run_until(self, moment: float) -> None:
        while self.running:
            task = min(self.running, key=lambda one: (one.ends, one.number))
            assert task.ends is not None
            if task.ends > moment:
                break
            clock.now = max(clock.now, task.ends)
            self.end(task)
        clock.now = max(clock.now, moment)


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "monotonic", lambda: clock.now)
    clock.now = 0.0


SPECS = st.fixed_dictionaries(
    {
        "devices": st.permutations(range(DEVICES)).flatmap(
            lambda order: st.sampled_from([1, 1, 1, 2, 2, 3, 4]).map(lambda n: order[:n])
        ),
        "share": st.sampled_from([None, None, None, 0.1, 0.25, 1 / 3, 0.5, 1.0]),
        "nbytes": st.sampled_from([0, 0, 0, 10, 34, 50, 100]),
        "seconds": st.sampled_from([0.01, 0.1, 0.5, 3.0]),
        "priority": st.sampled_from([0, 0, 0, 1]),
        "pause": st.sampled_from([0, 0, 0, 0.05, 1.0]),
        "cancels": st.sampled_from([None, None, None, None, 1, 5]),
    }
)


def run(specs: list[dict[str, Any]], tasks_per_device: int, known: bool) -> Machine:
    clock.now = 0.0
    machine = Machine(tasks_per_device, known)
    tasks: list[Task] = []
    for number, spec in enumerate(specs):
        task = Task(number, spec)
        tasks.append(task)
        machine.submit(task)
        if spec["cancels"] is not None and number >= spec["cancels"]:
            machine.cancel(tasks[number - spec["cancels"]])
        machine.run_until(clock.now + spec["pause"])
    machine.run_until(clock.now + 1e9)
    assert sorted(task.number for task in machine.done) == list(range(len(specs)))
    assert machine.admission.idle
    assert machine.admission.waiting() == ()
    return machine


@settings(max_examples=150)
@given(
    specs=st.lists(SPECS, max_size=25),
    tasks_per_device=st.sampled_from([1, 2, 3]),
    known=st.booleans(),
)
def test_all_end_and_no_device_is_over_its_places(
    specs: list[dict[str, Any]], tasks_per_device: int, known: bool
) -> None:
    run(specs, tasks_per_device, known)


def spec(*devices: int, seconds: float = 0.1, **more: Any) -> dict[str, Any]:
    return {
        "devices": devices,
        "share": None,
        "nbytes": 0,
        "seconds": seconds,
        "priority": 0,
    } | more


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seconds", [0.1, 0.7])
def test_a_task_of_all_devices_is_not_overtaken_endlessly(seconds: float, known: bool) -> None:
    """Its devices never are free at once by themselves; more urgent tasks are not stopped."""
    machine = Machine(1, known)
    generator = random.Random(0)
    large = Task(1000, spec(0, 1, 2, 3))
    number = 2000
    for n in range(4):
        machine.submit(Task(n, spec(n, seconds=seconds * (1 + n / 4))))
    for step in range(400):
        if step == 20:
            machine.submit(large)
        for n, queue in enumerate(machine.queues):
            if len(queue.tasks) < 2:
                number += 1
                task = Task(number, spec(n, seconds=seconds * generator.choice([1, 1.3])))
                # As tasks that use up an input: before others of their user's priority.
                task.urgency = (0, 0, number, task.prefix)
                machine.submit(task)
        if large in machine.done:
            break
        machine.run_until(clock.now + seconds / 10)
    assert large in machine.done
    waited = clock.now - large.arrived
    assert waited < module.PATIENCE_S + 4 * seconds + large.seconds


def test_dasks_priorities_hold() -> None:
    machine = Machine(1, known=True)
    machine.submit(Task(0, spec(0)))
    later, urgent = Task(1, spec(0, 1)), Task(2, spec(0, priority=1))
    machine.submit(later)
    machine.submit(urgent)
    machine.run_until(0.1)
    assert machine.running == [urgent]
    machine.run_until(0.2)
    assert machine.running == [later]


def test_others_fill_in_only_where_they_end_in_time() -> None:
    machine = Machine(1, known=True)
    machine.durations.update({"takes-1.0": 1.0, "takes-0.4": 0.4, "takes-0.9": 0.9})
    machine.submit(Task(0, spec(0, seconds=1.0)))
    large = Task(1, spec(0, 1))
    machine.submit(large)
    short, long = Task(2, spec(1, seconds=0.4)), Task(3, spec(1, seconds=0.9))
    machine.submit(short)
    machine.submit(long)
    assert short in machine.running
    machine.run_until(0.5)
    assert machine.running[1:] == []  # the long one would end after the large one can start
    machine.run_until(1.0)
    assert machine.running == [large]


def test_a_claim_that_waits_for_an_actor_holds_no_one_back() -> None:
    machine = Machine(1, known=False)
    actor = Task(0, spec(0, 1))
    machine.submit(actor)
    assert actor.claim is not None
    actor.claim.for_life = True
    machine.submit(Task(1, spec(1, 2)))
    clock.now = 100.0
    plain = Task(2, spec(2))
    machine.submit(plain)
    assert plain in machine.running
    actor.claim.release()
    machine.run_until(clock.now + 1)
    assert {task.number for task in machine.done} >= {1, 2}


def test_a_claim_that_is_withdrawn_reserves_nothing() -> None:
    machine = Machine(1, known=False)
    machine.submit(Task(0, spec(0, seconds=3.0)))
    waits = Task(1, spec(0) | {"share": 0.1})
    machine.submit(waits)
    machine.submit(Task(2, spec(0)))
    machine.run_until(2.0)  # the claim has waited for longer than unknown tasks may pass it
    machine.cancel(waits)
    machine.run_until(1e9)
    assert {task.number for task in machine.done} == {0, 1, 2}
