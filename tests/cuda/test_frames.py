"""Frames that have ended hold no arrays; those that go on are left alone."""

from __future__ import annotations

import weakref
from collections.abc import Generator

import pytest

from dask_devctx.cuda.out_of_memory import clear_frames


class Array:
    """An object that can be referred to weakly."""


seen: list[weakref.ref[Array]] = []


def held() -> Array:
    array = Array()
    seen.append(weakref.ref(array))
    return array


def fail() -> None:
    array = held()
    raise ValueError(type(array).__name__)


def fail_in_handling(*, caused: bool) -> None:
    array = held()
    try:
        fail()
    except ValueError as error:
        if caused:
            raise KeyError(type(array).__name__) from error
        raise KeyError(type(array).__name__)  # noqa: B904  # its context is what is tested


@pytest.mark.parametrize("caused", [False, True])
def test_frames_that_ended_forget_their_arrays(caused: bool) -> None:
    seen.clear()
    with pytest.raises(KeyError) as kept:
        fail_in_handling(caused=caused)
    assert [one() is None for one in seen] == [False] * 2
    clear_frames(kept.value)
    assert [one() for one in seen] == [None] * 2


def publish() -> Generator[ValueError | str]:
    """Yield the error of a frame of its own, and go on."""
    array = held()
    try:
        raise ValueError("published")
    except ValueError as error:
        yield error
    yield f"still has {array and 'its array'}"


def test_a_generator_that_waits_goes_on() -> None:
    going = publish()
    error = next(going)
    assert isinstance(error, ValueError)
    clear_frames(error)
    assert next(going) == "still has its array"
