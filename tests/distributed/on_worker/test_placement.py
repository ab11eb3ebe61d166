"""Who goes where: the counting, the policy, and that no queue waits for another."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_devctx import Device, devices, report
from dask_devctx.annotations import requested_device
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.placement.admission import WHOLE, Admission, Claim, share_units
from dask_devctx.worker.placement.placement import Placement
from dask_devctx.worker.placement.policy import (
    FULL_NBYTES,
    LINK_BYTES_PER_S,
    Candidate,
    start_soonest,
)
from tests.distributed.devices import here, with_plugin


class Keyed(Placement):
    """A placement of tasks by key."""

    def __init__(self, of: Sequence[Device], per_device: int, policy: Any) -> None:
        self.admission = Admission(of, per_device)
        super().__init__(self.admission, policy)
        self.placed: dict[object, Claim] = {}

    def put(self, key: object, prefix: str, wanted: object, inputs: Any = ()) -> Device:
        (device,) = self.place(requested_device({"device": wanted}, key, "assign"), inputs)  # type: ignore[arg-type]
        self.drop_task(key)
        claim = self.placed[key] = Claim(key, (device,), 1)  # type: ignore[arg-type]
        claim.prefix = prefix
        self.add(claim)
        return device

    def drop_task(self, key: object, seconds: float | None = None) -> Device | None:
        claim = self.placed.pop(key, None)
        if claim is None:
            return None
        self.remove(claim, seconds)
        return claim.devices[0]


def candidate(device: int = 0, **kwargs: Any) -> Candidate:
    defaults = {"queued": 0, "busy_s": 0.0, "move_nbytes": 0, "since": 0}
    return Candidate(Device(device), **{**defaults, **kwargs})


def first(candidates: Sequence[Candidate]) -> Candidate:
    return candidates[0]


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
        (
            {"busy_s": 60.0, "free_nbytes": 2**33},
            {"free_nbytes": 2**32, "move_nbytes": 2**32},
        ),
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


class Found(NamedTuple):
    """Where a value is."""

    nbytes: Mapping[Device, int]
    copies: Collection[Device] = ()


@pytest.fixture
def make() -> Callable[..., Keyed]:
    def make(per: int = 1, policy: Any = start_soonest) -> Keyed:
        return Keyed(devices(), per, policy)

    return make


def test_round_robin_on_ties(make: Callable[..., Keyed]) -> None:
    placement = make()
    placed = []
    for turn in range(8):  # each is done before the next one comes
        placed.append(placement.put(turn, "f", "auto").device_id)
        placement.drop_task(turn)
    assert placed == [0, 1, 2, 3, 0, 1, 2, 3]


def test_durations_by_prefix(make: Callable[..., Keyed]) -> None:
    placement = make()
    for prefix, seconds in (("long", 10.0), ("short", 0.1)):
        placement.put(prefix, prefix, 0)
        placement.drop_task(prefix, seconds)
    first = placement.put("a", "long", 0)
    for key in ("b", "c", "d"):
        for device in (1, 2, 3):
            placement.put((key, device), "short", device)
    # Nine short ones queue elsewhere, three a device, and still end before the long one.
    assert placement.put("next", "short", "auto") is not first


def test_inputs_draw_a_task_to_them(make: Callable[..., Keyed]) -> None:
    placement = make()
    inputs = [Found({Device(2): nbytes}) for nbytes in (10**9, 10**6)]
    assert placement.put("x", "f", "auto", inputs) is Device(2)
    assert placement.put("y", "f", "auto", []) is not Device(2)


def test_full_devices_come_last(make: Callable[..., Keyed], machine: SimulatedMachine) -> None:
    for gpu in machine.gpus[:3]:
        gpu.used_memory = gpu.total_memory - 2**20
    placement = make()
    assert {placement.put(key, "f", "auto") for key in range(4)} == {Device(3)}


def test_a_policy_of_ones_own(make: Callable[..., Keyed]) -> None:
    given: list[Sequence[Candidate]] = []

    def last(candidates: Sequence[Candidate]) -> Candidate:
        given.append(candidates)
        return candidates[-1]

    placement = make(policy=last)
    assert {placement.put(key, "f", "auto") for key in range(3)} == {Device(3)}
    assert [c.queued for c in given[-1]] == [0, 0, 0, 2]
    assert all(c.free_nbytes for c in given[-1])


def _last(candidates: Sequence[Candidate]) -> Candidate:
    return candidates[-1]


@with_plugin(policy=_last)
async def test_a_policy_travels_to_the_worker(client: Any) -> None:
    assert await client.gather(client.map(here, range(5))) == [3] * 5


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
    (note,) = error.__notes__
    assert f"policy _misspelled, policy=..., {__file__}, line " in note
    assert ": return min(candidates, key=lambda one: one.queud)" in note
    assert "AttributeError: 'Candidate' object has no attribute 'queud'" in str(
        await report(client)
    )


def test_inputs_are_counted_where_they_are(make: Callable[..., Keyed]) -> None:
    """Values on two devices, one spread over both, one on the host; one has a copy."""
    seen: list[Candidate] = []

    def policy(candidates: Sequence[Candidate]) -> Candidate:
        seen[:] = candidates
        return candidates[0]

    zero, one, two = devices()[:3]
    values = [
        Found({zero: 10}),
        Found({one: 20}, [two]),
        Found({one: 5}),
        Found({zero: 1, one: 2}),
        Found({}),
    ]
    placement = make(per=2, policy=policy)
    for key in range(2):
        placement.put(key, "x", 1)
    placement.put("x", "x", "auto", values)
    assert [c.move_nbytes for c in seen] == [27, 11, 18, 38]
    assert [c.moves for c in seen] == [3, 2, 3, 4]
    assert [c.waits for c in seen] == [False, True, False, False]


def test_a_broken_policy_is_named() -> None:
    def broken(candidates: Sequence[Candidate]) -> Candidate:
        raise KeyError("gpu")

    with pytest.raises(KeyError) as raised:
        Keyed(devices(), 1, broken).put("x", "x", "auto")
    assert "placement policy" in raised.value.__notes__[0]
    assert "broken" in raised.value.__notes__[0]
    for answer in (None, Device(1)):
        with pytest.raises(TypeError, match="must return one of the candidates"):
            Keyed(devices(), 1, lambda _, answer=answer: answer).put("x", "x", "auto")


# -- which waiting task may start


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
