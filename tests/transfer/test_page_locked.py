"""Host memory for values that leave a device: locked once, given out again, never above a limit."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from typing import Any

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, DriverError
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.transfer.page_locked import HostBlock, PageLockedPool

SLAB = 2 * 2**20


def pool_of(slabs: int, **kwargs: object) -> PageLockedPool:
    return PageLockedPool(Device(0), slabs * SLAB, slab=SLAB, **kwargs)  # type: ignore[arg-type]


def locked(machine: SimulatedMachine) -> tuple[int, int]:
    """How often pages were locked and unlocked."""
    calls = machine.faults.calls
    return calls["cuMemHostRegister"], calls["cuMemHostUnregister"]


def test_blocks_have_their_own_bytes(machine: SimulatedMachine) -> None:
    pool = pool_of(2)
    blocks = [pool.take(nbytes) for nbytes in (1, 1000, SLAB // 2, SLAB // 2)]
    for n, block in enumerate(blocks):
        assert block.is_page_locked
        block.contents[:] = bytes([n]) * block.nbytes
    assert [set(block.contents) for block in blocks] == [{0}, {1}, {2}, {3}]
    assert [len(block.contents) for block in blocks] == [1, 1000, SLAB // 2, SLAB // 2]
    assert pool.nbytes == 2 * SLAB
    assert sum(block.nbytes for block in blocks) <= pool.taken <= pool.nbytes
    addresses = {block.address for block in blocks}
    del block
    blocks.clear()
    assert pool.taken == 0
    assert pool.take(SLAB // 2).address in addresses
    assert locked(machine) == (2, 0)
    pool.close()
    assert locked(machine) == (2, 2)


@pytest.mark.parametrize(
    ("slabs", "nbytes", "is_locked"),
    [(4, 3 * SLAB, True), (4, 4 * SLAB + 1, False), (0, 100, False), (0, 0, False)],
)
def test_beyond_the_limit_memory_is_ordinary(
    machine: SimulatedMachine, slabs: int, nbytes: int, is_locked: bool
) -> None:
    pool = pool_of(slabs)
    block = pool.take(nbytes)
    assert block.is_page_locked == is_locked
    block.contents[:] = bytes(nbytes)
    assert pool.nbytes == (nbytes if is_locked else 0)
    assert pool.take(nbytes).is_page_locked is False
    assert pool.grow_ahead() is (slabs == 4)
    del block
    assert pool.take(nbytes).is_page_locked == is_locked or nbytes > slabs * SLAB
    pool.close()


def test_others_make_room_before_memory_is_ordinary(machine: SimulatedMachine) -> None:
    given: list[HostBlock] = []
    asked: list[int] = []

    def make_room(nbytes: int) -> bool:
        asked.append(nbytes)
        return bool(given and [given.pop()])

    pool = pool_of(1, make_room=make_room)
    given.append(pool.take(SLAB))
    assert pool.take(SLAB // 2).is_page_locked
    assert asked == [SLAB // 2]
    one = pool.take(SLAB // 2), pool.take(SLAB)
    assert [block.is_page_locked for block in one] == [True, False]
    assert asked == [SLAB // 2, SLAB]
    pool.close()


def test_two_slabs_are_locked_ahead(machine: SimulatedMachine) -> None:
    pool = pool_of(4)
    assert [pool.grow_ahead() for _ in range(3)] == [True, True, False]
    first = pool.take(SLAB)
    assert locked(machine)[0] == 2
    assert [pool.grow_ahead() for _ in range(2)] == [True, False]
    rest = pool.take(SLAB), pool.take(SLAB)
    assert [pool.grow_ahead() for _ in range(2)] == [True, False]  # now at its limit
    assert pool.nbytes == 4 * SLAB
    del first, rest
    pool.close()
    assert locked(machine) == (4, 4)


def test_a_driver_that_refuses_is_not_asked_again(
    machine: SimulatedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(4)
    first = pool.take(SLAB)
    machine.faults.inject("cuMemHostRegister", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING):
        blocks = [pool.take(SLAB) for _ in range(3)]
    assert not any(block.is_page_locked for block in blocks)
    assert not pool.grow_ahead()
    assert locked(machine)[0] == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert "No more host memory can be page-locked (cuMemHostRegister failed" in said
    assert first.is_page_locked
    at = first.address
    del first, blocks
    again = pool.take(SLAB)  # what was locked before stays locked
    assert again.is_page_locked
    assert again.address == at
    assert locked(machine) == (2, 0)
    pool.close()
    machine.faults.inject("cuMemHostRegister", CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):  # not that the host's memory is full
        pool_of(1).take(SLAB)


def test_blocks_outlive_the_pool(machine: SimulatedMachine) -> None:
    pool = pool_of(2)
    block, other = pool.take(SLAB), pool.take(SLAB)
    view = block.contents
    view[:] = b"x" * SLAB
    pool.close()
    assert locked(machine) == (2, 0)
    del other
    assert locked(machine) == (2, 1)
    del pool, block  # the view keeps the block
    gc.collect()
    assert set(view) == {ord("x")}
    assert locked(machine) == (2, 1)
    del view
    gc.collect()
    assert locked(machine) == (2, 2)


def test_a_pool_that_is_closed_while_pages_are_locked_keeps_none(machine: SimulatedMachine) -> None:
    pool = pool_of(2)
    machine.faults.inject("cuMemHostRegister", None, when=lambda *_: pool.close())
    assert not pool.take(100).is_page_locked
    gc.collect()
    assert (pool.nbytes, locked(machine)) == (0, (1, 1))


class _Ring:
    """Keeps a block in a cycle, so that only the garbage collector ends it."""

    def __init__(self, block: HostBlock) -> None:
        self.block = block
        self.itself = self


def _take_while_rings_end(pool: PageLockedPool, at: int) -> list[HostBlock]:
    """Take blocks while the collector, at one line of the pool's code, ends some others."""
    rings = [_Ring(pool.take(256)) for _ in range(20)]
    plain = [rings.pop(n).block for n in (15, 12, 11, 5, 4)]
    kept = [ring.block for ring in rings[::2]]
    gc.collect()  # the rings of these blocks
    before, lines = sys.gettrace(), itertools.count()

    def collect(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("page_locked.py", "pieces.py")):
            return None
        if event == "line" and next(lines) == at:
            gc.collect()
        return collect

    plain.clear()
    rings.clear()
    sys.settrace(collect)
    try:
        taken = pool.take(512)
    finally:
        sys.settrace(before)
    return [taken, *kept, *(pool.take(256) for _ in range(5))]


def test_the_garbage_collector_may_end_a_block_at_any_moment(machine: SimulatedMachine) -> None:
    gc.disable()
    gc.freeze()  # a collection takes 100 ms otherwise
    try:
        for at in range(40):
            pool = pool_of(1)
            blocks = _take_while_rings_end(pool, at)
            gc.collect()
            spans = sorted((one.address, one.address + one.nbytes) for one in blocks)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
            del blocks
            assert pool.taken == 0
            pool.close()
            assert pool.nbytes == 0
    finally:
        gc.unfreeze()
        gc.enable()
