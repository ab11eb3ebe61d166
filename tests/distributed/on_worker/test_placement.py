"""Who goes where: the counting, the policy, and that no queue waits for another."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import dask
import pytest
from distributed import Client, wait
from hypothesis import given
from hypothesis import strategies as st

from dask_devctx import Device, DeviceNotFoundError, LocalDeviceCluster, devices, report
from dask_devctx.annotations import Request, requested_device
from dask_devctx.driver.simulated import SimulatedMachine
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.placed: dict[object, tuple[Device, str]] = {}

    def put(self, key: object, prefix: str, wanted: object, inputs: Any = ()) -> Device:
        (device,) = self.place(requested_device({"device": wanted}, key, "assign"), inputs)  # type: ignore[arg-type]
        self.drop_task(key)
        self.add((device,), prefix)
        self.placed[key] = device, prefix
        return device

    def drop_task(self, key: object) -> Device | None:
        device, prefix = self.placed.pop(key, (None, ""))
        if device is not None:
            self.remove((device,), prefix)
        return device


def candidate(device: int = 0, **kwargs: Any) -> Candidate:
    defaults = {"queued": 0, "busy_s": 0.0, "move_nbytes": 0, "since": 0}
    return Candidate(Device(device), **{**defaults, **kwargs})


def first(candidates: Sequence[Candidate]) -> Candidate:
    return candidates[0]


@pytest.mark.parametrize("share", [1, 0.5])
def test_a_policy_chooses_among_the_devices_that_no_actor_keeps(share: float) -> None:
    placement = Keyed(devices()[:2], 2, first)
    placement.keep("actor", [Device(0)], 1)
    wants = Request(share=share, number=1)
    assert placement.place(wants) == (Device(1),)
    assert placement.put("any", "any", "auto") == Device(1)
    assert placement.place(Request(number=2)) == (Device(0), Device(1))
    placement.keep("other", [Device(1)], 0.75)
    assert placement.put("waits", "waits", "auto") == Device(0)
    placement.drop("actor")
    placement.keep("small", [Device(0)], 0.5)  # one of two places is left
    assert placement.put("fits", "fits", "auto") == Device(0)


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


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 9))),
    per_device=st.integers(1, 2),
)
def test_a_task_without_inputs_is_placed_by_the_policy(
    steps: list[tuple[int, str, int]], per_device: int
) -> None:
    """The short way for such tasks chooses as a policy does that is asked."""
    ours, asked = (
        Keyed(devices(), per_device, policy)
        for policy in (start_soonest, lambda candidates: start_soonest(candidates))
    )
    for number, (what, prefix, n) in enumerate(steps):
        for placement in (ours, asked):
            if what == 0 and placement.placed:
                placement.drop_task([*placement.placed][n % len(placement.placed)])
            elif what == 1:
                placement.record_duration(prefix, n / 100)
            elif what == 2:
                placement.keep(number, [placement.devices[n % 4]], 1.0)
            else:
                placement.put(number, prefix, n if n < 2 else "auto")
        assert ours.placed == asked.placed


class Found(NamedTuple):
    """Where a value is."""

    nbytes: Mapping[Device, int]
    copies: Collection[Device] = ()


class Shown:
    """A policy that keeps the candidates that it was shown."""

    def __call__(self, candidates: Sequence[Candidate]) -> Candidate:
        self.candidates = [*candidates]
        return start_soonest(candidates)

    def by(self, placement: Keyed) -> dict[Device, Candidate]:
        """Return what a placement with this policy says of its devices now."""
        placement.put("another", "another", "auto")
        placement.drop_task("another")
        return {one.device: one for one in self.candidates}


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
    placement.record_duration("long", 10.0)
    placement.record_duration("short", 0.1)
    first = placement.put("a", "long", 0)
    for key in ("b", "c", "d"):
        for device in (1, 2, 3):
            placement.put((key, device), "short", device)
    # Nine short ones queue elsewhere, three a device, and still end before the long one.
    assert placement.put("next", "short", "auto") is not first


def test_a_prefix_that_is_new_counts_as_the_others_did(make: Callable[..., Keyed]) -> None:
    shown = Shown()
    placement = make(policy=shown)
    placement.record_duration("known", 1.0)
    for key in range(5):
        placement.put(key, "new", 0)
    placement.put("known", "known", 1)
    found = shown.by(placement)
    assert found[Device(0)].busy_s > found[Device(1)].busy_s / 2


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


def test_memory_is_not_asked_for_at_every_task(
    make: Callable[..., Keyed], machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = make()
    placement.put(0, "f", "auto")
    machine.gpus[3].used_memory = machine.gpus[3].total_memory
    placed = {placement.put(key, "f", "auto") for key in range(1, 4)}
    assert Device(3) in placed  # the answer of half a second ago still holds


def test_a_policy_of_ones_own_is_asked_where_there_is_one_device() -> None:
    given: list[int] = []

    def only(candidates: Sequence[Candidate]) -> Candidate:
        given.append(len(candidates))
        return candidates[0]

    placement = Keyed(devices()[2:3], 1, only)
    assert placement.put("x", "f", "auto") is Device(2)
    assert given == [1]


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
async def test_a_policy_travels_to_the_worker(client: Any, scheduler: Any, worker: Any) -> None:
    assert await client.gather(client.map(here, range(5))) == [3] * 5


def _misspelled(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: one.queud)  # type: ignore[attr-defined]


@with_plugin(policy=_misspelled)
async def test_the_line_of_a_policy_that_raises_is_shown(
    client: Any, scheduler: Any, worker: Any
) -> None:
    log = logging.getLogger("distributed.worker.dask_devctx")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        futures = client.map(here, range(2))
        error = await futures[0].exception()
        await futures[1].exception()
    finally:
        log.removeHandler(handler)
    assert isinstance(error, AttributeError)
    frames = traceback.extract_tb(await futures[0].traceback())
    assert frames[0].name == "_misspelled"
    assert "one.queud" in str(frames[-1].line)
    (note,) = error.__notes__
    assert f"policy _misspelled, policy=..., {__file__}, line " in note
    assert ": return min(candidates, key=lambda one: one.queud)" in note
    found = [record for record in records if record.exc_info]
    assert ["_misspelled" in record.getMessage() for record in found] == [True]  # once
    assert "AttributeError: 'Candidate' object has no attribute 'queud'" in str(
        await report(client)
    )


@pytest.mark.parametrize("wanted", [1.5, True, [1], {"a": 1}, b"1", object()])
def test_what_names_no_device(make: Callable[..., Keyed], wanted: object) -> None:
    placement = make()
    placement.put("before", "f", 1)  # True == 1
    with pytest.raises(TypeError, match='"auto" for any device'):
        placement.put("x", "f", wanted)
    assert "x" not in placement.placed


def test_a_device_of_another_worker(make: Callable[..., Keyed]) -> None:
    placement = Keyed(devices()[:2], 1, start_soonest)
    with pytest.raises(
        DeviceNotFoundError,
        match=r"does not use.*Available: cuda:0 \(GPU-\w{8}\), cuda:1 \(GPU-\w{8}\);",
    ):
        placement.put("x", "f", "cuda:3")


def test_what_was_guessed_is_corrected_when_it_is_measured(
    make: Callable[..., Keyed],
) -> None:
    shown = Shown()
    placement = make(policy=shown)
    for key in range(8):
        placement.put(key, "new", "auto")
    placement.put("other", "other", 1)
    first = placement.drop_task(0)
    placement.record_duration("new", 0.001)
    busy = {device: one.busy_s for device, one in shown.by(placement).items()}
    assert busy.pop(first) == pytest.approx(0.001)
    assert busy.pop(Device(1)) > 0.05
    assert [*busy.values()] == pytest.approx([0.002] * 2)


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from([None, "auto", 0, 1, 2, 3]))))
def test_the_counts_are_right_whatever_comes(steps: list[tuple[int, object]]) -> None:
    shown = Shown()
    placement = Keyed(devices(), 2, shown)
    placement.record_duration("f", 0.1)
    there: dict[int, Device] = {}
    for key, wanted in steps:
        if wanted is None:
            placement.drop_task(key)
            there.pop(key, None)
        else:
            device = placement.put(key, "f", wanted)
            there[key] = device
    assert {key: device for key, (device, _) in placement.placed.items()} == there
    for device, found in shown.by(placement).items():
        count = list(there.values()).count(device)
        assert found.queued == count
        assert found.busy_s == pytest.approx(0.1 * count / 2)  # two run at a time
    for key in there:
        placement.drop_task(key)
    assert {(one.queued, one.busy_s) for one in shown.by(placement).values()} == {(0, 0.0)}


def _tenth(i: int) -> tuple[int | None, float, float]:
    begun = time.perf_counter()
    time.sleep(0.1)
    return here(), begun, time.perf_counter()


@pytest.mark.long
def test_a_busy_devices_queue_keeps_no_other_waiting() -> None:
    with (
        LocalDeviceCluster(
            processes=False, dashboard_address=":0", devices=[0, 1], memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        wait(client.map(_tenth, range(4), pure=False))  # threads and durations are known
        with dask.annotate(device=1):
            first = client.map(_tenth, range(16), pure=False)
        with dask.annotate(device=0):
            second = client.map(_tenth, range(16), pure=False)
        first, second = client.gather([first, second])
    assert [{device for device, *_ in runs} for runs in (first, second)] == [{1}, {0}]
    end = max(stop for _, _, stop in first)
    beside = sum(begun < end for _, begun, _ in second)
    assert beside >= 8  # one queue after the other would be 0, and 16 on a quiet machine


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
