"""Values in host memory, as they are spilled and restored: one pickle and blocks of bytes."""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import Stamp, hold
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.frames import Part, allocate
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.parcel import Parcel, Parts, pack, unpack
from dask_devctx.transfer.page_locked import HostBlock
from dask_devctx.worker.values.spillable import are_arrays, as_view, find

# A part of a value: the library that allocates memory for it, its bytes, and the library's details.
Description = tuple[str, int, Any]
_POLL_S: Final = 1e-4
# One view that is larger than this part of its allocation leaves with all of it.
_LARGE: Final = 0.5
Take = Callable[[int], HostBlock]


class HostForm:
    """Some values in host memory, which share memory with each other; a single one mostly.

    Each of the ``parts`` was on the device ``home``: its description, and its bytes. ``buffers`` is
    further host memory that is not in the pickle, which is that of the tuple of the values.
    """

    def __init__(
        self,
        pickled: Any,
        buffers: Sequence[memoryview],
        parts: Sequence[tuple[Description, HostBlock]],
        home: Device,
    ) -> None:
        self.pickled = pickled
        self.buffers = buffers
        self.parts = parts
        self.home = home
        self.nbytes = sum(block.nbytes for _, block in parts)
        self.are_arrays = False
        # The values' owners: each has the value of its index.
        self.members: list[weakref.ref[Any]] = []

    @property
    def share(self) -> int:
        """The bytes of the parts for each of the values."""
        return self.nbytes // max(len(self.members), 1)

    @property
    def host_nbytes(self) -> int:
        """The bytes of host memory for each of the values."""
        return self.share + len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    @classmethod
    def copied(
        cls, values: tuple[Any, ...], device: Device, after: Sequence[Stamp], take: Take
    ) -> HostForm:
        """Return the host form of values on a device, after the work that makes them; waits."""
        return cls.begun(values, device, after, take).finish()

    @classmethod
    def begun(
        cls,
        values: tuple[Any, ...],
        device: Device,
        after: Sequence[Stamp],
        take: Take,
        behind: Copying | None = None,
    ) -> Copying:
        """Begin what :meth:`copied` does, behind another copy of the device that is under way."""
        copying = None
        try:
            with device:
                for stamp in after:
                    stamp.hold_back_readers()  # for types that are pickled by their own code
                parcel = pack(values, find)
                parts = [(part.description, take(part.nbytes)) for part in parcel.parts]
                form = cls(parcel.pickled, parcel.buffers, parts, device)
                form.are_arrays = are_arrays(values)
                lane = lanes.take(device)
                copying = Copying(form, lane, parcel)
                for stamp in after:
                    lane.after(stamp)
                if parcel.gathered:
                    lane.after_current_streams()
                if behind is not None:
                    lane.behind(behind.lane)
                for part, (_, block) in zip(parcel.parts, parts, strict=True):
                    lane.copy_out(block.address, part.pointer, part.nbytes)
        except BaseException:
            if copying is not None:
                copying.drop()
            raise
        return copying

    def on_device(self, device: Device) -> tuple[tuple[Any, ...], Stamp]:
        """Return the values on a device, and the stamp of the copy; this does not wait for it."""
        with device:
            memory, pointers = [], []
            for (kind, nbytes, detail), _ in self.parts:
                one, pointer = allocate(kind, nbytes, detail, device)
                memory.append(one)
                pointers.append(pointer)
            lane = lanes.shared(device, "in")
            try:
                # The libraries reuse memory that earlier work in their streams still reads.
                lane.after_current_streams()
                for pointer, (_, block) in zip(pointers, self.parts, strict=True):
                    lane.copy_in(pointer, block.address, block.nbytes)
            finally:  # after an error, too, copies may be under way
                stamp = Stamp({device: (lane.reached(),)})
                hold(stamp, self, memory)
            if any(description[0] == "jax" for description, _ in self.parts):
                wait_for(stamp)  # JAX does not reveal the streams that read it
            elif self.buffers or not _only_arrays(self.parts):
                stamp.hold_back(device)  # unpickling may compute
            return unpack(self.pickled, self.buffers, memory), stamp

    def apart(self, take: Take) -> list[HostForm]:
        """Return a host form of each value with its own bytes only, or this one.

        A piece of an array is a view, which holds all memory of the array that it was cut from. If
        it came back as such, a task that joins small pieces of many arrays would need the memory of
        all of them. Views that have more bytes together than their array come back sharing it.
        """
        if not self.are_arrays or len(self.parts) != 1:
            return [self]
        ((description, block),) = self.parts
        views = unpack(self.pickled, self.buffers, [_Contents(block)])
        most = block.nbytes * (_LARGE if len(views) == 1 else 1)
        if sum(view.nbytes for view in views) > most:
            return [self]
        return [_alone(view, description, self, take) for view in views]

    # -- to other processes, and to disk

    def parcel(self, index: int) -> Parcel:
        """Return one of the values, packed for another process of the machine."""
        buffers: list[pickle.PickleBuffer] = []
        member = _Member(self.pickled, self.buffers, index)
        pickled = pickle.dumps(member, protocol=5, buffer_callback=buffers.append)
        parts = [
            Part(block.address, nbytes, kind, detail, block, on_host=True)
            for (kind, nbytes, detail), block in self.parts
        ]
        return Parcel(pickled, [buffer.raw() for buffer in buffers], parts)

    def frames(self) -> list[Any]:
        """Return its bytes without the pickle."""
        return [*self.buffers, *(block.contents for _, block in self.parts)]

    @property
    def descriptions(self) -> list[Description]:
        return [description for description, _ in self.parts]


class Copying:
    """A host form whose copy is under way; :meth:`finish` or :meth:`drop` it."""

    __slots__ = ("_form", "_parcel", "lane")

    def __init__(self, form: HostForm, lane: Lane, parcel: Parcel) -> None:
        self.lane = lane
        self._form = form
        self._parcel: Parcel | None = parcel  # it may have memory that the copy reads

    def finish(self) -> HostForm:
        """Return the host form when its copy is done."""
        lanes.finish(self.lane)
        self._parcel = None
        return self._form

    def drop(self) -> None:
        """Wait for the copy, whose result is not needed."""
        lanes.drop(self.lane)


def wait_for(stamp: Stamp) -> None:
    """Wait until the work of a stamp is done."""
    while not stamp.done():
        time.sleep(_POLL_S)


def _only_arrays(parts: Sequence[tuple[Description, HostBlock]]) -> bool:
    """Return whether unpickling puts arrays around the parts without computing."""
    return all(description[0] in ("cupy", "simulated") for description, _ in parts)


class _Contents:
    """Takes the place of an allocation while views of it are unpickled as views of its bytes."""

    def __init__(self, block: HostBlock) -> None:
        self._contents = block.contents

    def _view(self, offset: int, shape: Any, dtype: Any, strides: Any) -> Any:
        import numpy as np  # as arrays do

        return np.ndarray(shape, dtype, self._contents, offset, strides)


class _Piece(NamedTuple):
    """A view as it will be: dense, at the start of its own memory."""

    part: Part
    shape: Any
    dtype: Any
    strides: Any


def _alone(view: Any, description: Description, form: HostForm, take: Take) -> HostForm:
    """Return a host form of one view, whose bytes are copied unless it is all of its array."""
    kind, nbytes, detail = description
    ((_, block),) = form.parts
    if view.nbytes != nbytes or not view.flags.c_contiguous:
        block = take(view.nbytes)
        dense = type(view)(view.shape, view.dtype, block.contents)
        dense[...] = view
        view = dense
    part = Part(block.address, block.nbytes, kind, detail, block, on_host=True)
    parcel = pack((_Piece(part, view.shape, view.dtype, view.strides),), _find_piece)
    return HostForm(parcel.pickled, parcel.buffers, [(part.description, block)], form.home)


def _find_piece(kind: type) -> Any:
    return _reduced if kind is _Piece else None


def _reduced(piece: _Piece, parts: Parts) -> Any:
    at = parts.add(piece.part)
    return as_view[piece.part.kind], (at, 0, piece.shape, piece.dtype, piece.strides)


class _Member:
    """One value of several in a pickle."""

    def __init__(self, pickled: Any, buffers: Sequence[Any], index: int) -> None:
        self._pickled = pickled
        self._buffers = buffers
        self._index = index

    def __reduce__(self) -> Any:
        buffers = [pickle.PickleBuffer(buffer) for buffer in self._buffers]
        return _one_of, (self._pickled, buffers, self._index)


def _one_of(pickled: Any, buffers: Sequence[Any], index: int) -> Any:
    return pickle.loads(pickled, buffers=buffers)[index]


class Sent:
    """One value of a host form, on its way to another process: there it is the value itself."""

    __slots__ = ("form", "index")

    def __init__(self, form: HostForm, index: int) -> None:
        self.form = form
        self.index = index

    def __reduce_ex__(self, protocol: Any) -> Any:
        form = self.form
        n_buffers = len(form.buffers)
        frames = [
            pickle.PickleBuffer(frame) if protocol >= 5 else bytes(frame) for frame in form.frames()
        ]
        return arrived, (form.pickled, form.descriptions, n_buffers, frames, self.index)


def arrived(
    pickled: Any, descriptions: list[Description], n_buffers: int, frames: list[Any], index: int
) -> Any:
    """Return a value that left another process as a :class:`Sent`, on the current device."""
    device = Device.current() or Device(0)
    parts = [
        (tuple(description), block_of(frame))
        for description, frame in zip(descriptions, frames[n_buffers:], strict=True)
    ]
    form = HostForm(pickled, frames[:n_buffers], parts, device)
    values, stamp = form.on_device(device)
    wait_for(stamp)  # any thread may use it next
    return values[index]


def block_of(frame: Any) -> HostBlock:
    """Return a frame's memory as a block."""
    import ctypes

    view = memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(bytearray(1))
    if view.readonly:
        view = memoryview(bytearray(view))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    nbytes = memoryview(frame).nbytes
    return HostBlock(view, address, nbytes, is_page_locked=False)
