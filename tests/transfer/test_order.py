"""Every reader of a value comes after the work that makes it, and no more than that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, SimulatedArray, to_device
from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer import Stamp, copy_streams, events, hold, release_held, stamp
from dask_devctx.transfer.move import Move
from tests.conftest import simulation  # noqa: F401  # both
from tests.transfer.order import Order
from tests.transfer.shapes import array

Streams = Callable[..., None]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Make streams current, as the loaded libraries would tell."""

    def make_current(*streams: int) -> None:
        monkeypatch.setattr(events, "current_streams", lambda device: streams)

    return make_current


@pytest.mark.parametrize("stamped", [False, True])
def test_a_copy_comes_after_the_work_that_makes_its_source(
    order: Order, x: SimulatedArray, stamped: bool
) -> None:
    order.give("made", 0)
    after = stamp(x) if stamped else None
    order.give("later", 0) if stamped else None
    moved = Move(Device(1), after, guard_source=False).run(x)
    assert order.before_allocations == [(1, {"made"})]
    assert moved.device is Device(1)
    assert "copy" not in order.before(0), "the source's device does not wait"
    assert Device.current() is None


def test_several_stamps_and_several_devices(order: Order, x: SimulatedArray) -> None:
    with Device(2):
        y = SimulatedArray((2,))
    order.before_allocations.clear()
    order.give("x", 0)
    order.give("y", 2)
    after = [stamp(x), stamp(y)]
    to_device([x, y], 1, after=[one for one in after if one is not None])
    assert [work >= {"x"} for _, work in order.before_allocations] == [True, True]
    assert order.before_allocations[-1][1] >= {"x", "y"}


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: [x]])
def test_where_a_value_is_already_only_its_stamp_is_waited_for(
    order: Order, x: SimulatedArray, current: Streams, kind: Callable[[Any], Any]
) -> None:
    value = kind(x)
    own = order.stream(0, blocking=False)
    order.give("made", 0)
    made = stamp(value)
    current(own)
    assert to_device(value, 0) is value
    assert order.before(0, own) == set()
    assert to_device(value, 0, after=made) is value
    assert order.before(0, own) == {"made"}


def test_a_copy_to_the_host_comes_after_the_work(
    order: Order, x: SimulatedArray, current: Streams
) -> None:
    own = order.stream(0, blocking=False)
    order.give("made", 0)
    made = stamp(x)
    current(own)
    to_device(x, "cpu", after=made)
    assert order.before(0, own) == {"made"}


def test_readers_on_another_thread_and_in_a_stream_of_their_own(
    order: Order, x: SimulatedArray
) -> None:
    order.give("made", 0)
    made = stamp(x)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(made.hold_back, Device(2)).result()
    assert order.before(2) == {"made"}
    own = order.stream(1, blocking=False)
    made.hold_back(Device(1), own)
    assert order.before(1, own) == {"made"}
    stream = None
    with Device(3):
        stream = copy_streams.CopyStream(Device(3))
        stream.after(made)
    assert order.before(3, stream._stream) == {"made"}


# -- the streams that a stamp covers


def test_a_stamp_covers_current_and_blocking_streams(
    order: Order, x: SimulatedArray, current: Streams
) -> None:
    """And one that was made non-blocking only if it is current, or a covered one waits for it."""
    own, left, waited_for = (order.stream(0, blocking=False) for _ in range(3))
    blocking = order.stream(0, blocking=True)
    for stream in (own, left, waited_for, blocking, LEGACY_STREAM, PER_THREAD_STREAM):
        order.give(str(stream), 0, stream)
    with Device(0) as device:
        events.Event(device).record(waited_for).holds_back(own)
    current(own)
    made = stamp(x)
    current(LEGACY_STREAM)
    made.hold_back(Device(1))
    covered = {own, waited_for, blocking, LEGACY_STREAM, PER_THREAD_STREAM}
    assert order.before(1) == {str(stream) for stream in covered}
    assert made.devices == (Device(0),)


def test_a_stream_does_not_wait_for_its_own_work(
    machine: SimulatedMachine, order: Order, x: SimulatedArray
) -> None:
    """A wait releases the GIL, and other threads take it."""
    order.give("made", 0)
    made = stamp(x)
    machine.faults.inject("cuEventQuery", CUresult.CUDA_ERROR_NOT_READY)
    waits = machine.faults.calls["cuStreamWaitEvent"]
    made.hold_back(Device(0))
    assert machine.faults.calls["cuStreamWaitEvent"] == waits
    made.hold_back(Device(1))
    assert machine.faults.calls["cuStreamWaitEvent"] == waits + 1


def test_a_stamp_of_streams_covers_nothing_else(order: Order, current: Streams) -> None:
    own = order.stream(0, blocking=False)
    order.give("own", 0, own)
    order.give("legacy", 0)
    current(own)
    made = Stamp.of_devices([Device(0)], blocking=False)
    current(LEGACY_STREAM)
    made.hold_back(Device(1))
    assert order.before(1) == {"own"}


def test_what_is_held_lives_until_its_work_is_done(
    machine: SimulatedMachine, order: Order, x: SimulatedArray
) -> None:
    with Device(0):
        source = SimulatedArray(1000)
    used = machine.gpus[0].used_memory
    to_device(source, 1)
    made = stamp(x)
    assert made is not None
    hold(made, source)
    del source
    assert release_held() == 2
    assert machine.gpus[0].used_memory == used
    machine.faults.clear()
    assert release_held() == 0
    assert machine.gpus[0].used_memory == used - 8000


# -- a user's ``__del__`` that copies an array: the garbage collector may call it at any moment


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
            moved.append(to_device(array(2, 3), 3))
            held = array(2)
            after = stamp(held)
            assert after is not None
            hold(after, held)
            release_held()
        return False

    def move() -> None:
        made = array(0, 1)
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
