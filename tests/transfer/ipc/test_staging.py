"""Staging memory is bounded, given out in pieces, and freed only when nobody uses it."""

from __future__ import annotations

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, SimulatedArray
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError
from dask_devctx.transfer import stamp
from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.sending import Sending, Staging

MIB = 2**20


def used(machine: SimulatedMachine) -> int:
    return machine.gpus[1].used_memory


def test_it_takes_no_memory_until_something_is_sent(machine: SimulatedMachine) -> None:
    staging = Staging(Device(1), 64 * MIB)
    assert (used(machine), staging.nbytes) == (0, 0)
    assert staging.take(1, grow=False) is None
    piece = staging.take(1000)
    assert piece is not None
    assert used(machine) == staging.nbytes == 2 * MIB
    assert staging.take(MIB, grow=False) is not None


def test_it_keeps_to_its_limit(machine: SimulatedMachine) -> None:
    staging = Staging(Device(1), 8 * MIB)
    pieces = []
    while (piece := staging.take(MIB)) is not None:
        pieces.append(piece)
    assert len(pieces) == 8
    assert used(machine) == staging.nbytes == staging.in_use == 8 * MIB
    assert len({piece.pointer for piece in pieces}) == 8
    staging.give(pieces[3:5])
    assert staging.take(MIB) is not None
    assert used(machine) == 8 * MIB


def test_a_device_without_memory_has_no_room(machine: SimulatedMachine) -> None:
    machine.gpus[1].total_memory = 5 * MIB
    staging = Staging(Device(1), 64 * MIB)
    assert staging.take(4 * MIB) is not None
    assert staging.take(4 * MIB) is None
    assert staging.take(100) is None


def test_what_cannot_be_exported_is_not_kept(machine: SimulatedMachine) -> None:
    machine.faults.inject("cuIpcGetMemHandle", CUresult.CUDA_ERROR_NOT_SUPPORTED)
    staging = Staging(Device(1), 8 * MIB)
    with pytest.raises(DriverError, match="cuIpcGetMemHandle failed"):
        staging.take(10)
    assert (used(machine), staging.nbytes) == (0, 0)
    assert staging.take(10) is not None


def test_what_is_in_use_is_not_given_back(machine: SimulatedMachine) -> None:
    staging = Staging(Device(1), 64 * MIB)
    first, second = staging.take(2 * MIB), staging.take(4 * MIB)
    assert first is not None
    assert second is not None
    staging.give([first])
    retired = staging.retire()
    assert [buffer.number for buffer in retired] == [first.buffer.number]
    assert used(machine) == 6 * MIB  # until nobody has it open
    staging.free(retired)
    assert used(machine) == staging.nbytes == 4 * MIB
    assert staging.take(MIB) is not None
    assert staging.retire() == []


@pytest.mark.parametrize("limit", [2 * MIB, 64 * MIB])
def test_a_transfer_is_staged_piece_by_piece(machine: SimulatedMachine, limit: int) -> None:
    with Device(1) as device:
        arrays = [SimulatedArray.asarray([float(n)] * 100_001) for n in range(3)]
    parts = [Part(a._pointer, a.nbytes, "simulated", None, a) for a in arrays]
    before = used(machine)
    staging = Staging(device, limit)
    made = stamp(arrays)
    assert made is not None
    sending = Sending(parts, staging, [made])
    found = b""
    pieces = -(-sending.nbytes // sending.piece)
    assert pieces == (1 if limit == 64 * MIB else 6)
    for index in range(pieces):
        lane = sending.start(index)
        assert lane is not None
        sending.finish(index, lane)
        place = sending.place(index)
        assert place is not None
        number, handle, offset, nbytes = place
        assert len(handle) == 64
        buffer = sending._staged[index].buffer
        assert number == buffer.number
        with device:
            found += device._backend.calls.work.copy_to_host(buffer.pointer + offset, nbytes)
        sending.was_read(index)
        assert staging.in_use <= 2 * (sending.piece + 256)
    sending.close()
    assert staging.in_use == 0
    for place, array in enumerate(arrays):
        begins = place * (-(-800_008 // 256) * 256)
        assert found[begins : begins + 800_008] == array.get().tobytes()
    assert used(machine) == before + staging.nbytes


def test_a_transfer_that_fails_gives_its_piece_back(machine: SimulatedMachine) -> None:
    with Device(1) as device:
        array = SimulatedArray((1000,))
    staging = Staging(device, 8 * MIB)
    part = Part(array._pointer, array.nbytes, "simulated", None, array)
    sending = Sending([part], staging, [])
    machine.faults.inject("cuMemcpyAsync", CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(DriverError, match="cuMemcpyAsync failed"):
        sending.start(0)
    sending.close()
    assert staging.in_use == 0
    again = Sending([part], staging, [])
    lane = again.start(0)
    assert lane is not None
    again.finish(0, lane)


def test_a_transfer_that_is_given_up_takes_no_more_memory(machine: SimulatedMachine) -> None:
    with Device(1) as device:
        array = SimulatedArray.asarray([1.0] * 100_001)
    staging = Staging(device, 2 * MIB)
    part = Part(array._pointer, array.nbytes, "simulated", None, array)
    sending = Sending([part], staging, [])
    sending.in_pieces()
    lane = sending.start(0)
    assert lane is not None
    sending.finish(0, lane)
    sending.close()  # its receiver is gone
    assert sending.start(1) is None  # it had waited for room
    assert staging.in_use == 0


def test_a_piece_goes_back_when_nothing_is_copied_into_it_any_more(
    machine: SimulatedMachine,
) -> None:
    with Device(1) as device:
        array = SimulatedArray.asarray([1.0] * 100_001)
    staging = Staging(device, 2 * MIB)
    part = Part(array._pointer, array.nbytes, "simulated", None, array)
    sending = Sending([part], staging, [])
    lane = sending.start(0)
    assert lane is not None
    sending.close()
    assert staging.in_use == array.nbytes - array.nbytes % 256 + 256
    assert sending.place(0) is None
    sending.finish(0, lane)
    assert staging.in_use == 0
