"""Which waiting task may start: a model of all devices, and the promises one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_devctx import Device
from dask_devctx.worker.placement.admission import WHOLE, Admission, Claim, share_units

DEVICES = [Device(number) for number in range(4)]
LIMIT = 100


class Line:
    """Claims on four devices, the names of those that hold, and what they hold together."""

    def __init__(self, tasks_per_device: int = 1) -> None:
        self.admission = Admission(DEVICES, tasks_per_device, dict.fromkeys(DEVICES, LIMIT))
        self.held: list[str] = []
        self.claims: dict[str, Claim] = {}

    def submit(
        self,
        name: str,
        *devices: int,
        priority: int = 1,
        share: float | None = None,
        nbytes: int = 0,
    ) -> Claim:
        units = self.admission.slot if share is None else share_units(share)
        group = tuple(DEVICES[number] for number in devices)
        claim = self.claims[name] = Claim(name, group, units, nbytes, (priority,))
        claim.granted = lambda: None if claim.void else self.held.append(name)
        self.admission.submit(claim)
        self.check()
        return claim

    def end(self, name: str) -> None:
        self.held.remove(name)
        self.admission.release(self.claims[name])
        self.check()

    def check(self) -> None:
        for device in DEVICES:
            holding = [c for c in self.claims.values() if c.held and device in c.devices]
            assert sum(claim.share for claim in holding) <= WHOLE
            assert sum(claim.nbytes for claim in holding) <= LIMIT


asks = st.fixed_dictionaries(
    {
        "devices": st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
        "share": st.sampled_from([None, None, 0.1, 0.3, 0.5, 1.0]),
        "nbytes": st.sampled_from([0, 0, 10, 60, 100]),
        "priority": st.integers(0, 2),
    }
)


@given(st.lists(asks, max_size=40), st.integers(1, 3), st.randoms(use_true_random=False))
def test_all_start_and_no_device_is_over_its_slots(
    specs: list[dict[str, object]], tasks_per_device: int, chance: random.Random
) -> None:
    line = Line(tasks_per_device)
    todo = list(enumerate(specs))
    started = 0
    while todo or line.held:
        if todo and (chance.random() < 0.6 or not line.held):
            number, spec = todo.pop()
            given_devices = spec["devices"]
            assert isinstance(given_devices, list)
            line.submit(
                str(number), *given_devices, **{k: v for k, v in spec.items() if k != "devices"}
            )  # type: ignore[arg-type]
        elif line.held:
            line.end(chance.choice(line.held))
            started += 1
    assert started == len(specs)
    assert line.admission.idle


def test_the_smallest_priority_first() -> None:
    line = Line()
    line.submit("runs", 0)
    for name, priority in (("late", 3), ("soon", 1), ("next", 2)):
        line.submit(name, 0, priority=priority)
    order = []
    while line.held:
        order.append(line.held[0])
        line.end(line.held[0])
    assert order == ["runs", "soon", "next", "late"]


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


@pytest.mark.parametrize("asked", [{"share": 1.0}, {"nbytes": 60, "share": 0.1}])
def test_a_claim_that_waits_for_an_actor_holds_no_one_back(asked: dict[str, float]) -> None:
    line = Line(tasks_per_device=2)
    actor = line.submit("actor", 0, share=0.5, nbytes=50)
    line.submit("waits", 0, priority=0, **asked)  # type: ignore[arg-type]
    line.submit("passes", 0)
    line.admission.keep(actor)
    assert line.held == ["actor", "passes"]
    assert [claim.key for claim in line.admission.blocked()] == ["waits"]
    assert "cuda:0 is held by 'actor'" in line.admission.waits_for_actors()
    line.end("passes")
    line.end("actor")
    assert line.held == ["waits"]
    assert line.admission.waits_for_actors() == ""


def test_a_claim_that_is_withdrawn_reserves_nothing() -> None:
    line = Line()
    line.submit("runs", 0)
    both = line.submit("both", 0, 1)
    line.submit("behind", 1)
    line.admission.withdraw(both)
    assert both.void
    assert line.held == ["runs", "behind"]
    line.admission.release(both)
    line.check()
