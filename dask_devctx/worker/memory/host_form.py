"""Values in host memory, as they leave a device and come back: one pickle and blocks of bytes."""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import Stamp, hold
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.ipc.frames import Part, allocate
from dask_devctx.transfer.ipc.lanes import Lane
from dask_devctx.transfer.ipc.parcel import Parcel, pack, unpack
from dask_devctx.transfer.page_locked import HostBlock
from dask_devctx.worker.memory.types import are_arrays, find

# A part of a value: the library that allocates memory for it, its bytes, and the library's details.
Description = tuple[str, int, Any]
_POLL_S: Final = 1e-4
Take = Callable[[int], HostBlock]


class HostForm:
    """Some values in host memory, which share memory with each other; a single one mostly.

    Parameters
    ----------
    pickled
        The pickle of the tuple of the values.
    buffers
        Host memory that belongs to the values and is not in the pickle.
    parts
        The description of each part that was on a device, and its bytes.
    home
        The device on which the values were.

    Attributes
    ----------
    nbytes
        The bytes of the parts.
    are_arrays
        Whether each of the values is known to be one array.
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
        """Return the host form of values on a device, after the work that makes them.

        This waits for the copy, on a stream of its own.

        Raises
        ------
        DriverError
            The device fails.
        Exception
            A value cannot be pickled.
        """
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
        """Return the values on a device, and the stamp of the copy; this does not wait for it.

        Raises
        ------
        MemoryError
            There is not enough memory. Each library raises its own class: torch's is a
            ``RuntimeError``.
        DriverError
            The device fails.
        """
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

    def apart(self, take: Take, *, unshared: bool = False) -> list[HostForm] | None:
        """Return a host form of each value alone; None if they stay together: see `apart`."""
        if not self.are_arrays or len(self.parts) != 1:
            return None
        from dask_devctx.worker.memory.pieces import apart  # which needs NumPy, as arrays do

        return apart(self, take, unshared=unshared)

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
        """Return the host form when its copy is done.

        Raises
        ------
        DriverError
            The device fails.
        """
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
        (tuple(description), _block_of(frame))
        for description, frame in zip(descriptions, frames[n_buffers:], strict=True)
    ]
    form = HostForm(pickled, frames[:n_buffers], parts, device)
    values, stamp = form.on_device(device)
    wait_for(stamp)  # any thread may use it next
    return values[index]


def _block_of(frame: Any) -> HostBlock:
    """Return a frame's memory as a block."""
    import ctypes

    view = memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(bytearray(1))
    if view.readonly:
        view = memoryview(bytearray(view))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    nbytes = memoryview(frame).nbytes
    return HostBlock(view, address, nbytes, is_page_locked=False)
