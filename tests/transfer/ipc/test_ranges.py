"""Pieces of staging memory do not overlap, and come back whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dask_devctx.transfer.ipc.ranges import ALIGNMENT, Ranges, aligned

_STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60)


@given(_STEPS)
def test_pieces_are_aligned_and_never_overlap(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges(64 * ALIGNMENT)
    taken: dict[int, int] = {}
    for take, number in steps:
        if take:
            offset = ranges.take(number)
            if offset is not None:
                assert offset % ALIGNMENT == 0
                assert offset + number <= ranges.nbytes
                end = offset + aligned(max(number, 1))
                assert all(end <= o or o + n <= offset for o, n in taken.items())
                taken[offset] = aligned(max(number, 1))
            else:
                held = sum(taken.values())
                assert held + number > 0  # an empty one gives anything that fits
                assert taken or number > ranges.nbytes
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            ranges.give(offset)
            del taken[offset]
        assert ranges.unused == (not taken)
    for offset in taken:
        ranges.give(offset)
    assert ranges.take(ranges.nbytes) == 0  # one piece again, whatever the order was


def test_a_gap_between_two_pieces_is_used_again() -> None:
    ranges = Ranges(3 * ALIGNMENT)
    first, middle, last = (ranges.take(ALIGNMENT) for _ in range(3))
    assert ranges.take(1) is None
    assert middle is not None
    ranges.give(middle)
    assert ranges.take(ALIGNMENT + 1) is None
    assert ranges.take(1) == middle
    assert (first, last) == (0, 2 * ALIGNMENT)
