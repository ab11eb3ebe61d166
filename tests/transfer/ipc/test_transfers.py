"""Staging memory, other processes' memory, values that are packed without theirs, and streams."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings.driver import CUresult
from hypothesis import given
from hypothesis import strategies as st

from dask_devctx import Device, driver
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer import copy_streams
from dask_devctx.transfer.ipc.receiving import OpenedBuffers, Receiving
from dask_devctx.transfer.ipc.sending import Staging
from dask_devctx.transfer.parcel import Described, Header
from dask_devctx.transfer.pieces import ALIGNMENT, Ranges, aligned
from dask_devctx.worker import packing
from tests.addressed import AddressedDriver, addressed

MIB = 2**20
assert packing  # it knows how to allocate simulated memory


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_pieces_of_a_block_never_overlap_and_come_back_whole(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges(64 * ALIGNMENT)
    taken: dict[int, int] = {}
    for take, number in steps:
        nbytes = aligned(max(number, 1))
        if not take:
            if taken:
                offset = sorted(taken)[number % len(taken)]
                ranges.give(offset)
                del taken[offset]
        elif (found := ranges.take(number)) is not None:
            assert found % ALIGNMENT == 0
            assert found + number <= ranges.nbytes
            assert all(found + nbytes <= o or o + n <= found for o, n in taken.items())
            taken[found] = nbytes
        else:
            ends = [0, *(offset + n for offset, n in sorted(taken.items()))]
            begins = [*sorted(taken), ranges.nbytes]
            gaps = [begin - end for end, begin in zip(ends, begins, strict=True)]
            assert max(gaps) < nbytes, "a gap is used again"
        assert ranges.taken == sum(taken.values())
    for offset in taken:
        ranges.give(offset)
    assert ranges.take(ranges.nbytes) == 0  # one piece again, whatever the order was


# -- staging memory


@pytest.fixture
def staging(machine: SimulatedMachine) -> Staging:
    return Staging(Device(1), 8 * MIB)


def used(machine: SimulatedMachine) -> int:
    return machine.gpus[1].used_memory


def test_it_grows_when_it_is_needed_up_to_its_limit(
    machine: SimulatedMachine, staging: Staging
) -> None:
    assert (used(machine), staging.nbytes, staging.piece(1, grow=False)) == (0, 0, None)
    pieces = [staging.piece(MIB)]
    assert used(machine) == staging.nbytes == 2 * MIB
    while (piece := staging.piece(MIB)) is not None:
        pieces.append(piece)
    assert len({(buffer.pointer, offset) for buffer, offset in filter(None, pieces)}) == 8
    assert used(machine) == staging.nbytes == staging.taken == 8 * MIB
    for piece in pieces[3:5]:
        assert piece is not None
        staging.give(*piece)
    assert staging.piece(MIB, grow=False) is not None
    assert used(machine) == 8 * MIB


def test_what_is_in_use_is_not_given_back(machine: SimulatedMachine, staging: Staging) -> None:
    first, second = staging.piece(2 * MIB), staging.piece(4 * MIB)
    assert first is not None
    assert second is not None
    staging.give(*first)
    retired = staging.retire()
    assert [buffer.handle for buffer in retired] == [first[0].handle]
    assert used(machine) == 6 * MIB  # until nobody has it open
    assert staging.piece(MIB, grow=False) is None
    staging.use_again(retired)
    assert staging.piece(MIB, grow=False) is not None
    staging.free(staging.retire())
    assert used(machine) == staging.nbytes == 6 * MIB
    assert staging.retire() == []


# -- memory of other processes

EXPORTS = """
import sys
from dask_devctx import Device
from tests.device_memory import write
with Device(0) as device:
    work = device._backend.calls.work
    pointer = work.allocate(4096)
    write(work, pointer, bytes(range(256)) * 16)
    print(work.ipc_export(pointer).hex(), flush=True)
    input()
"""


@pytest.fixture
def handle(machine: SimulatedMachine) -> Iterator[bytes]:
    """The handle of another process's memory."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", EXPORTS], **pipes) as child:
        yield bytes.fromhex(child.stdout.readline())
        child.communicate("\n")


def opened_and_closed(machine: SimulatedMachine) -> tuple[int, int]:
    calls = machine.faults.calls
    return calls["cuIpcOpenMemHandle"], calls["cuIpcCloseMemHandle"]


@pytest.mark.parametrize("asks", [False, True], ids=["its process is gone", "its owner asks"])
def test_a_buffer_is_closed_while_it_is_opened(
    machine: SimulatedMachine, handle: bytes, asks: bool
) -> None:
    buffers, answers = OpenedBuffers(), []

    def close() -> None:
        answers.append(buffers.close("peer", [handle] if asks else None))

    thread = threading.Thread(target=close)
    machine.faults.inject("cuIpcOpenMemHandle", None, when=lambda *_: thread.start())
    with Device(0) as device:
        opened = buffers.get("peer", handle, device)
        thread.join(10)
        assert answers == [False]  # it is about to be read
        assert opened_and_closed(machine) == (1, 0)
        del opened
        assert opened_and_closed(machine) == (1, 1)
        assert ("peer", handle, device) not in buffers.opened


def test_values_are_read_from_a_buffer_that_is_opened_once(
    machine: SimulatedMachine, handle: bytes
) -> None:
    buffers, device, content = OpenedBuffers(), Device(1), bytes(range(256)) * 16
    parts = tuple(Described("dask_devctx", nbytes, None) for nbytes in (300, 0, 700))

    for turn in range(2):
        one = Receiving("peer", Header("", parts, handle, 0), device, buffers)
        one.allocate()
        assert one.is_quick() == (turn > 0)
        one.start()
        one.finish()
        got = [memory.get().tobytes() for memory in one.parts]
        assert got == [content[:300], b"", content[512:1212]]
    assert opened_and_closed(machine) == (1, 0)
    assert buffers.close("another")
    assert buffers.close("peer", [b"another"])
    assert opened_and_closed(machine) == (1, 0)
    assert buffers.close("peer", [handle])
    assert opened_and_closed(machine) == (1, 1)


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuEventCreate"])
def test_a_lane_can_be_had_while_the_driver_waits_for_another(
    machine: SimulatedMachine, function: str
) -> None:
    """Where a stream is full, it may wait for the device. The event loop takes streams, too."""
    waiting, go_on, taken = threading.Event(), threading.Event(), threading.Event()

    def wait(*_: object) -> bool:
        waiting.set()
        go_on.wait(20)
        return False

    def share() -> None:
        with Device(0):
            copy_streams.shared(Device(0), "in")

    def take() -> None:
        with Device(0):
            copy_streams.give(copy_streams.take(Device(0)))
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


@pytest.fixture
def calls(machine: SimulatedMachine) -> Iterator[AddressedDriver]:
    """A driver that tells addresses: a call by address keeps the GIL."""
    pytest.importorskip("dask_devctx.driver._scope")
    with driver.use(addressed(machine)), Device(0):
        assert isinstance(machine.driver, AddressedDriver)
        yield machine.driver


def _enqueued(calls: AddressedDriver, copies: int = 1, nbytes: int = 8) -> list[str]:
    """Return the calls by address that copies in a stream take."""
    work = Device(0)._backend.calls.work
    memory = work.allocate(2 * copy_streams.FEW_NBYTES + 2)
    stream = copy_streams.take(Device(0))
    calls.enqueued.clear()
    stream.after_current_streams()
    calls.asked.clear()
    stream.keep_lock(copies, nbytes)
    for _ in range(copies):
        stream.copy(memory + nbytes, memory, nbytes)
    stream.mark()
    found = list(calls.enqueued)
    stream.copy(memory + nbytes, memory, nbytes)  # more of them need a new look
    stream.mark()
    assert calls.enqueued == found
    assert stream.done()
    copy_streams.finish(stream)
    work.free(memory)
    return found


QUESTIONS = [("cuStreamIsCapturing", LEGACY_STREAM), ("cuStreamQuery", LEGACY_STREAM)]


def test_a_few_copies_keep_pythons_lock_where_no_stream_is_full(calls: AddressedDriver) -> None:
    """The events in the streams of libraries do not: these may be full."""
    assert _enqueued(calls) == ["cuMemcpyAsync", "cuEventRecord"]
    assert calls.asked == QUESTIONS
    few = copy_streams.FEW
    assert _enqueued(calls, few) == ["cuMemcpyAsync"] * few + ["cuEventRecord"]
    assert _enqueued(calls, nbytes=copy_streams.FEW_NBYTES) == ["cuMemcpyAsync", "cuEventRecord"]
    assert _enqueued(calls, few + 1) == []
    assert _enqueued(calls, nbytes=copy_streams.FEW_NBYTES + 1) == []
    calls.busy.add(LEGACY_STREAM)
    assert _enqueued(calls) == []
