"""Values in host memory, as they are spilled and restored: pickles and blocks of bytes."""

from __future__ import annotations

import ctypes
import pickle
import time
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.transfer.events import Stamp, hold, is_captured
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.parcel import Parcel, Part, Parts, allocate, pack, unpack
from dask_devctx.transfer.page_locked import HostBlock
from dask_devctx.worker.comms.device_types import are_arrays, find, find_views

# A part of a value: the library that allocates memory for it, its bytes, and the library's details.
Description = tuple[str, int, Any]
Pickle = tuple[bytes, Sequence[Any]]  # and the host memory that is not in it
_POLL_S: Final = 1e-4
# One view that is larger than this part of its allocation leaves with all of it.
_LARGE: Final = 0.5


class HostForm:
    """Some values in host memory, which share memory with each other; a single one mostly.

    Each of the ``parts`` was on the device ``home``: its description, and its bytes. Each value has
    a pickle around them.
    """

    def __init__(
        self,
        pickles: Sequence[Pickle],
        parts: Sequence[tuple[Description, HostBlock]],
        home: Device,
    ) -> None:
        self.pickles = pickles
        self.parts = parts
        self.home = home
        self.nbytes = sum(block.nbytes for _, block in parts)
        # The values' owners: each has the value of its index.
        self.members: list[weakref.ref[Any]] = []

    @property
    def share(self) -> int:
        """The bytes of the parts for each of the values."""
        return self.nbytes // max(len(self.members), 1)

    @property
    def host_nbytes(self) -> int:
        """The bytes of host memory for each of the values."""
        pickled = sum(len(p) + sum(memoryview(b).nbytes for b in bs) for p, bs in self.pickles)
        return self.share + pickled // len(self.pickles)

    def on_device(self, device: Device, wanted: Container[int]) -> tuple[dict[int, Any], Stamp]:
        """Return values by index on a device, and the stamp of the copy; does not wait for it."""
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
            found = {
                index: unpack(*each, memory)
                for index, each in enumerate(self.pickles)
                if index in wanted
            }
            return found, stamp

    # -- to other processes, and to disk

    def parcel(self, index: int) -> Parcel:
        """Return one of the values, packed for another process of the machine."""
        pickled, buffers = self.pickles[index]
        parts = [
            Part(block.address, nbytes, kind, detail, block, on_host=True)
            for (kind, nbytes, detail), block in self.parts
        ]
        return Parcel(pickled, [memoryview(buffer) for buffer in buffers], parts)

    def frames(self, index: int) -> list[Any]:
        """Return the bytes of one of the values without its pickle."""
        return [*self.pickles[index][1], *(block.contents for _, block in self.parts)]

    @property
    def descriptions(self) -> list[Description]:
        return [description for description, _ in self.parts]

    @classmethod
    def of_frames(
        cls,
        pickled: bytes,
        descriptions: Sequence[Description],
        n_buffers: int,
        frames: Sequence[Any],
        home: Device,
    ) -> HostForm:
        """Return a value that arrived as its frames."""
        blocks = map(block_of, frames[n_buffers:])
        parts = [(tuple(one), block) for one, block in zip(descriptions, blocks, strict=True)]
        return cls([(bytes(pickled), frames[:n_buffers])], parts, home)


class Copying:
    """Host forms of values on a device, whose copies are under way; finish or drop it.

    The values are copied after the work that makes them, and ``behind`` another copy.
    """

    # A piece of an array is a view, which holds all memory of the array that it was cut from. If
    # small pieces came back as such, a task that joins pieces of many arrays would need the memory
    # of all of them. So they leave as arrays of their own. Views that have more bytes together than
    # their array leave with it, and come back sharing it.

    def __init__(
        self,
        values: Sequence[Any],
        nbytes: int,
        device: Device,
        after: Sequence[Stamp],
        take: Callable[[int], HostBlock],
        behind: Copying | None = None,
    ) -> None:
        self.forms: list[HostForm] = []  # of all values, or one of each
        self._packed: list[Parts] = []  # may have memory that the copy reads
        most = nbytes * (_LARGE if len(values) == 1 else 1)
        apart = (
            are_arrays(values)
            and sum(value.nbytes for value in values) <= most
            and all(value.dtype.names is None for value in values)
        )
        # The copies that make pieces dense would spoil a graph that another thread captures.
        apart = apart and not is_captured(device)
        with device:
            for stamp in after:
                stamp.hold_back_readers()  # for types that are pickled by their own code
            try:
                self._pack(
                    [[value] for value in values] if apart else [values], apart, device, take
                )
            except Exception as error:
                if not (apart and is_out_of_memory(error)):
                    raise
                self._pack([values], False, device, take)
            self._lane = lanes.take(device)
            try:
                for stamp in after:
                    self._lane.after(stamp)
                if any(parts.gathered for parts in self._packed):
                    self._lane.after_current_streams()
                if behind is not None:
                    self._lane.behind(behind._lane)
                for form, parts in zip(self.forms, self._packed, strict=True):
                    for part, (_, block) in zip(parts.all, form.parts, strict=True):
                        self._lane.copy_out(block.address, part.pointer, part.nbytes)
            except BaseException:
                self.drop()
                raise

    def _pack(
        self,
        groups: Sequence[Sequence[Any]],
        apart: bool,
        device: Device,
        take: Callable[[int], HostBlock],
    ) -> None:
        self.forms, self._packed = [], []
        for group in groups:
            parts = Parts()
            packed = [pack(value, find if apart else find_views, parts) for value in group]
            pickles = [(one.pickled, one.buffers) for one in packed]
            blocks = [(tuple(part.description), take(part.nbytes)) for part in parts.all]
            self.forms.append(HostForm(pickles, blocks, device))
            self._packed.append(parts)

    def finish(self) -> list[HostForm]:
        """Return the host forms when their copies are done."""
        lanes.finish(self._lane)
        self._packed = []
        return self.forms

    def drop(self) -> None:
        """Wait for the copies, whose result is not needed."""
        lanes.drop(self._lane)


def wait_for(stamp: Stamp) -> None:
    """Wait until the work of a stamp is done."""
    while not stamp.done():
        time.sleep(_POLL_S)


class Sent:
    """One value of a host form, on its way to another process: there it is the value itself."""

    __slots__ = ("form", "index")

    def __init__(self, form: HostForm, index: int) -> None:
        self.form = form
        self.index = index

    def __reduce_ex__(self, protocol: Any) -> Any:
        form = self.form
        pickled, buffers = form.pickles[self.index]
        frames = [
            pickle.PickleBuffer(frame) if protocol >= 5 else bytes(frame)
            for frame in form.frames(self.index)
        ]
        return arrived, (pickled, form.descriptions, len(buffers), frames)


def arrived(
    pickled: Any, descriptions: list[Description], n_buffers: int, frames: list[Any]
) -> Any:
    """Return a value that left another process as a :class:`Sent`, on the current device."""
    device = Device.current() or Device(0)
    form = HostForm.of_frames(pickled, descriptions, n_buffers, frames, device)
    values, stamp = form.on_device(device, {0})
    wait_for(stamp)  # any thread may use it next
    return values[0]


def block_of(frame: Any) -> HostBlock:
    """Return a frame's memory as a block."""
    given = memoryview(frame)
    view = given.cast("B") if given.nbytes else memoryview(bytearray(1))
    if view.readonly:
        view = memoryview(bytearray(view))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return HostBlock(view, address, given.nbytes, is_page_locked=False)
