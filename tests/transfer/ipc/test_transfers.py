"""Staging memory is bounded and given out in pieces; other processes' memory is opened once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings.driver import CUresult
from hypothesis import given
from hypothesis import strategies as st

from dask_devctx import Device, SimulatedArray
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError
from dask_devctx.transfer import stamp
from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.messages import Described, Header, Place
from dask_devctx.transfer.ipc.ranges import ALIGNMENT, Ranges, aligned, in_a_row
from dask_devctx.transfer.ipc.receiving import OpenedBuffers, Receiving
from dask_devctx.transfer.ipc.sending import Sending, Staging
from dask_devctx.worker.comms import device_types

MIB = 2**20
assert device_types  # it knows how to allocate simulated memory


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
        assert (ranges.unused, ranges.taken) == (not taken, sum(taken.values()))
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
    assert (used(machine), staging.nbytes, staging.take(1, grow=False)) == (0, 0, None)
    pieces = [staging.take(MIB)]
    assert used(machine) == staging.nbytes == 2 * MIB
    while (piece := staging.take(MIB)) is not None:
        pieces.append(piece)
    assert len({piece.pointer for piece in pieces if piece is not None}) == 8
    assert used(machine) == staging.nbytes == staging.in_use == 8 * MIB
    for piece in pieces[3:5]:
        assert piece is not None
        staging.give(piece)
    assert staging.take(MIB, grow=False) is not None
    assert used(machine) == 8 * MIB


def test_what_is_in_use_is_not_given_back(machine: SimulatedMachine, staging: Staging) -> None:
    first, second = staging.take(2 * MIB), staging.take(4 * MIB)
    assert second is not None
    staging.give(first)
    retired = staging.retire()
    assert [buffer.number for buffer in retired] == [first.buffer.number]
    assert used(machine) == 6 * MIB  # until nobody has it open
    assert staging.take(MIB, grow=False) is None
    staging.use_again(retired)
    assert staging.take(MIB, grow=False) is not None
    staging.free(staging.retire())
    assert used(machine) == staging.nbytes == 6 * MIB
    assert staging.retire() == []


# -- transfers


def part(array: SimulatedArray) -> Part:
    return Part(array._pointer, array.nbytes, "simulated", None, array)


def arrays(n: int, count: int) -> list[SimulatedArray]:
    with Device(1):
        return [SimulatedArray.asarray([float(k)] * n) for k in range(count)]


@pytest.mark.parametrize("limit", [2 * MIB, 64 * MIB])
def test_a_transfer_is_staged(machine: SimulatedMachine, limit: int) -> None:
    """Also one that is larger than the limit, alone."""
    values = arrays(100_001, 3)
    before, staging, made = used(machine), Staging(Device(1), limit), stamp(values)
    assert made is not None
    sending = Sending([part(value) for value in values], staging, [made])
    lane = sending.start()
    assert lane is not None
    sending.finish(lane)
    number, handle, offset, nbytes = sending.staged.place
    buffer = sending.staged.buffer
    assert (number, handle, len(handle)) == (buffer.number, buffer.handle, 64)
    with Device(1) as device:
        found = device._backend.calls.work.copy_to_host(buffer.pointer + offset, nbytes)
    other = Sending([part(value) for value in values], staging, [made])
    if (lane := other.start()) is not None:
        other.finish(lane)
    assert (lane is None) is (limit == 2 * MIB)
    other.close()
    sending.close()
    assert staging.in_use == 0
    for index, value in enumerate(values):
        begins = index * aligned(800_008)
        assert found[begins : begins + 800_008] == value.get().tobytes()
    assert used(machine) == before + staging.nbytes


def test_a_transfer_that_fails_gives_its_piece_back(
    machine: SimulatedMachine, staging: Staging
) -> None:
    (array,) = arrays(1000, 1)
    sending = Sending([part(array)], staging)
    machine.faults.inject("cuMemcpyAsync", CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(DriverError, match="cuMemcpyAsync failed"):
        sending.start()
    sending.close()
    assert staging.in_use == 0
    assert Sending([part(array)], staging).start() is not None


def test_a_closed_transfer_gives_a_piece_back_after_its_copy_and_takes_no_more(
    machine: SimulatedMachine,
) -> None:
    (array,) = arrays(100_001, 1)
    staging = Staging(Device(1), 2 * MIB)
    sending = Sending([part(array)], staging)
    lane = sending.start()
    assert lane is not None
    sending.close()  # its receiver is gone
    assert staging.in_use == aligned(sending.nbytes)
    sending.finish(lane)
    assert staging.in_use == 0
    assert sending.start() is None  # it had waited for room
    assert staging.in_use == 0


# -- memory of other processes

NBYTES = 4096
EXPORTS = """
import sys
from dask_devctx import Device
with Device(0) as device:
    work = device._backend.calls.work
    pointer = work.allocate(4096)
    work.copy_from_host(pointer, bytes(range(256)) * 16)
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


@pytest.mark.parametrize("numbers", [None, [1]], ids=["its process is gone", "its owner asks"])
def test_a_buffer_is_closed_while_it_is_opened(
    machine: SimulatedMachine, handle: bytes, numbers: list[int] | None
) -> None:
    buffers = OpenedBuffers()
    answers = []

    def close(*args: object) -> bool:
        answers.append(buffers.close("peer", numbers))
        return False

    with Device(0) as device:
        machine.faults.inject("cuIpcOpenMemHandle", None, when=close)
        opened = buffers.begin("peer", Place(1, handle, 0, NBYTES), device)
        assert answers == [False]  # it is about to be read
        assert opened_and_closed(machine) == (1, 0)
        buffers.end(opened)
        assert opened_and_closed(machine) == (1, 1)
        assert not buffers.has("peer", 1, device)


def test_values_are_read_from_a_buffer_that_is_opened_once(
    machine: SimulatedMachine, handle: bytes
) -> None:
    buffers, device, content = OpenedBuffers(), Device(1), bytes(range(256)) * 16
    parts = tuple(Described("simulated", nbytes, None) for nbytes in (300, 0, 700))
    _, total = in_a_row(one.nbytes for one in parts)

    def receiving(offset: int) -> Receiving:
        header = Header("peer", "", parts, Place(1, handle, offset, total))
        made = Receiving(header, device, buffers)
        made.allocate()
        return made

    for turn in range(2):
        one = receiving(0)
        assert one.is_quick() == (turn > 0)
        one.finish(*one.start())
        got = [memory.get().tobytes() for memory in one.parts]
        assert got == [content[:300], b"", content[512:1212]]
    with pytest.raises(ValueError, match="is not in a buffer"):
        receiving(NBYTES - total + 1).start()
    assert opened_and_closed(machine) == (1, 0)
    assert buffers.close("another")
    assert buffers.close("peer", [2])
    assert opened_and_closed(machine) == (1, 0)
    assert buffers.close("peer", [1])
    assert opened_and_closed(machine) == (1, 1)
