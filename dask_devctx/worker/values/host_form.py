"""Values in host memory, as they are spilled and restored: pickles and blocks of bytes."""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.transfer.events import Stamp, hold, is_captured
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.parcel import Parcel, Part, allocate, pack, unpack
from dask_devctx.transfer.page_locked import HostBlock
from dask_devctx.worker.comms.device_types import find, find_views, is_array

# A part of a value: the library that allocates memory for it, its bytes, and the library's details.
Description = tuple[str, int, Any]
About = tuple[list[Description], int]
_POLL_S: Final = 1e-4
# One view that is larger than this part of its allocation leaves with all of it.
_LARGE: Final = 0.5


class HostForm:
    """A value in host memory: a pickle, the host memory that is not in it, and its device memory.

    Each of the ``parts`` was on the device ``home``: its description, and its bytes.
    """

    def __init__(
        self,
        pickled: bytes,
        buffers: Sequence[Any],
        parts: Sequence[tuple[Description, HostBlock]],
        home: Device,
    ) -> None:
        self.pickled = pickled
        self.buffers = buffers
        self.parts = parts
        self.home = home
        self.nbytes = sum(block.nbytes for _, block in parts)

    @property
    def host_nbytes(self) -> int:
        """The bytes of host memory."""
        return self.nbytes + len(self.pickled) + sum(memoryview(b).nbytes for b in self.buffers)

    def on_device(self, device: Device) -> tuple[Any, Stamp]:
        """Return the value on a device, and the stamp of the copy; does not wait for it."""
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
            else:
                stamp.hold_back(device)  # unpickling may compute
            return unpack(self.pickled, self.buffers, memory), stamp

    # -- to other processes, and to disk

    def parcel(self) -> Parcel:
        """Return the value, packed for another process of the machine."""
        parts = [
            Part(block.address, nbytes, kind, detail, block, on_host=True)
            for (kind, nbytes, detail), block in self.parts
        ]
        return Parcel(self.pickled, [memoryview(buffer) for buffer in self.buffers], parts)

    @property
    def about(self) -> About:
        """What :meth:`of_frames` needs beside the frames."""
        return [description for description, _ in self.parts], len(self.buffers)

    @property
    def frames(self) -> list[Any]:
        """The bytes of the value."""
        return [self.pickled, *self.buffers, *(block.contents for _, block in self.parts)]

    @classmethod
    def of_frames(cls, about: About, frames: Sequence[Any], home: Device) -> HostForm:
        """Return a value that arrived as its frames."""
        descriptions, n_buffers = about
        pickled, *rest = frames
        blocks = map(block_of, rest[n_buffers:])
        parts = [(tuple(one), block) for one, block in zip(descriptions, blocks, strict=True)]
        return cls(bytes(pickled), rest[:n_buffers], parts, home)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be the value itself in another process."""
        frames = [
            pickle.PickleBuffer(frame) if protocol >= 5 else bytes(frame) for frame in self.frames
        ]
        return arrived, (self.about, frames)


class Copying:
    """Host forms of values on a device, one of each, whose copies are under way; finish or drop it.

    The values are copied after the work that makes them.
    """

    def __init__(
        self,
        values: Sequence[Any],
        nbytes: int,
        device: Device,
        after: Sequence[Stamp],
        take: Callable[[int], HostBlock],
    ) -> None:
        self._forms: list[HostForm] = []
        self._packed: list[Parcel] = []  # may have memory that the copy reads
        # A piece of an array is a view, which holds all memory of the array that it was cut from.
        # If small pieces came back as such, a task that joins pieces of many arrays would need the
        # memory of all of them. So they leave as arrays of their own. The copies that make pieces
        # dense would spoil a graph that another thread captures.
        most = -1.0 if is_captured(device) else nbytes * (_LARGE if len(values) == 1 else 1)
        with device:
            for stamp in after:
                stamp.hold_back_readers()  # for types that are pickled by their own code
            for value in values:
                if is_array(value) and value.nbytes <= most and value.dtype.names is None:
                    try:
                        self._pack(value, find, device, take)
                        continue
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                self._pack(value, find_views, device, take)
            with lanes.taken(device) as self._lane:
                for stamp in after:
                    self._lane.after(stamp)
                if any(parcel.gathered for parcel in self._packed):
                    self._lane.after_current_streams()
                for form, parcel in zip(self._forms, self._packed, strict=True):
                    for part, (_, block) in zip(parcel.parts, form.parts, strict=True):
                        self._lane.copy_out(block.address, part.pointer, part.nbytes)

    def _pack(
        self, value: Any, find: Any, device: Device, take: Callable[[int], HostBlock]
    ) -> None:
        packed = pack(value, find)
        blocks = [(tuple(part.description), take(part.nbytes)) for part in packed.parts]
        self._forms.append(HostForm(packed.pickled, packed.buffers, blocks, device))
        self._packed.append(packed)

    def finish(self) -> list[HostForm]:
        """Return the host forms when their copies are done."""
        lanes.finish(self._lane)
        self._packed = []
        return self._forms

    def drop(self) -> None:
        """Wait for the copies, whose result is not needed."""
        lanes.drop(self._lane)


def wait_for(stamp: Stamp) -> None:
    """Wait until the work of a stamp is done."""
    while not stamp.done():
        time.sleep(_POLL_S)


def arrived(about: About, frames: list[Any]) -> Any:
    """Return a value that left another process as its host form, on the current device."""
    device = Device.current() or Device(0)
    value, stamp = HostForm.of_frames(about, frames, device).on_device(device)
    wait_for(stamp)  # any thread may use it next
    return value


def block_of(frame: Any) -> HostBlock:
    """Return a frame's memory as a block."""
    given = memoryview(frame)
    view = given.cast("B") if given.nbytes else memoryview(bytearray(1))
    if view.readonly:
        view = memoryview(bytearray(view))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return HostBlock(view, address, given.nbytes, is_page_locked=False)
