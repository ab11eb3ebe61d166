"""A value is packed without its memory on a device, and what it shares it shares afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.parcel import Parcel, Parts, Reduce, pack, unpack


class Memory:
    """Stands in for a library's array: bytes at an address."""

    def __init__(self, pointer: int, content: bytes) -> None:
        self.pointer = pointer
        self.content = content

    def __reduce__(self) -> Any:
        raise AssertionError("memory of a device was pickled")


class View:
    def __init__(self, memory: Memory, name: str) -> None:
        self.memory = memory
        self.name = name


def find(kind: type) -> Reduce | None:
    return _reduce if kind is View else None


def _reduce(view: View, parts: Parts) -> Any:
    memory = view.memory
    part = Part(memory.pointer, len(memory.content), "a kind", None, memory)
    return View, (parts.add(part), view.name)


def sent(value: Any) -> tuple[Any, Parcel]:
    parcel = pack(value, find)
    arrived = [Memory(1000 + part.pointer, part.owner.content) for part in parcel.parts]
    return unpack(parcel.pickled, [bytes(b) for b in parcel.buffers], arrived), parcel


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any


def test_memory_goes_beside_the_pickle() -> None:
    memory = Memory(7, b"abc")
    found, parcel = sent({"x": [View(memory, "x")], "n": 1})
    assert [(part.pointer, part.nbytes, part.owner) for part in parcel.parts] == [(7, 3, memory)]
    assert found["n"] == 1
    assert found["x"][0].name == "x"
    assert found["x"][0].memory.pointer == 1007


def test_what_looks_at_the_same_memory_does_so_afterwards() -> None:
    memory = Memory(7, b"abc")
    view = View(memory, "x")
    found, parcel = sent(Pair([view, view], View(Memory(7, b"abc"), "y")))
    assert len(parcel.parts) == 1
    assert found.first[0] is found.first[1]
    assert found.second.memory is found.first[0].memory


def test_empty_memory_is_not_taken_for_other_empty_memory() -> None:
    found, parcel = sent([View(Memory(0, b""), "x"), View(Memory(0, b""), "y")])
    assert len(parcel.parts) == 2
    assert [view.name for view in found] == ["x", "y"]


def test_a_value_may_hold_itself() -> None:
    value: list[Any] = [View(Memory(7, b"abc"), "x")]
    value.append(value)
    found, _ = sent(value)
    assert found[1] is found
    assert found[0].memory.pointer == 1007


def test_host_arrays_are_not_copied_into_the_pickle() -> None:
    host = np.arange(10_000.0)
    found, parcel = sent([host, host[::2], View(Memory(7, b"abc"), "x")])
    assert len(parcel.pickled) < host.nbytes
    assert sum(buffer.nbytes for buffer in parcel.buffers) >= host.nbytes
    assert np.array_equal(found[0], host)
    assert np.array_equal(found[1], host[::2])


def test_a_function_without_a_name_goes_beside_memory() -> None:
    found, parcel = sent([lambda x: x + 1, View(Memory(7, b"abc"), "x")])
    assert found[0](1) == 2
    assert len(parcel.parts) == 1


class Refuses:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


def test_what_cannot_be_pickled_says_why() -> None:
    with pytest.raises(ValueError, match="not me"):
        pack([Refuses()], find)
