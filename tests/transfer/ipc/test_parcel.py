"""A value is packed without its memory on a device, and what it shares it shares afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.parcel import Parcel, Parts, Reduce, pack, unpack


class Memory:
    """Stands in for a library's array: bytes at an address."""

    def __init__(self, pointer: int, content: bytes = b"abc") -> None:
        self.pointer = pointer
        self.content = content

    def __reduce__(self) -> Any:
        raise AssertionError("memory of a device was pickled")


class View:
    def __init__(self, memory: Memory, name: str = "x") -> None:
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


def test_memory_goes_beside_the_pickle_and_stays_shared() -> None:
    memory = Memory(7)
    view = View(memory)
    value: dict[str, Any] = {"views": [view, view], "same": View(Memory(7), "y"), "n": 1}
    value["itself"] = value
    found, parcel = sent(value)
    assert [(part.pointer, part.nbytes, part.owner) for part in parcel.parts] == [(7, 3, memory)]
    assert found["n"] == 1
    assert found["itself"] is found
    first, second = found["views"]
    assert first is second
    assert first.memory is found["same"].memory
    assert (first.memory.pointer, first.name, found["same"].name) == (1007, "x", "y")


def test_other_memory_is_not_taken_for_the_same() -> None:
    values = [
        View(Memory(0, b""), "x"),
        View(Memory(0, b""), "y"),
        View(Memory(7)),
        View(Memory(8)),
    ]
    found, parcel = sent(values)
    assert len(parcel.parts) == 4
    assert [(view.memory.pointer, view.name) for view in found] == [
        (1000, "x"),
        (1000, "y"),
        (1007, "x"),
        (1008, "x"),
    ]


def test_host_arrays_are_not_copied_into_the_pickle() -> None:
    host = np.arange(10_000.0)
    found, parcel = sent([host, host[::2], View(Memory(7))])
    assert len(parcel.pickled) < host.nbytes
    assert sum(buffer.nbytes for buffer in parcel.buffers) >= host.nbytes
    assert np.array_equal(found[0], host)
    assert np.array_equal(found[1], host[::2])
