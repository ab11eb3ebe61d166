"""Values in host memory, as they are spilled and restored: pickles and blocks of bytes."""

from __future__ import annotations

import ctypes
import functools
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

from distributed.protocol.serialize import dask_deserialize, dask_serialize

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.errors import DriverUnavailableError
from dask_devctx.transfer import copy_streams, nbytes_by_device
from dask_devctx.transfer.events import Stamp, hold, is_captured
from dask_devctx.transfer.location import memory_of
from dask_devctx.transfer.page_locked import HostBlock, PageLockedPool, copy_ordinary
from dask_devctx.transfer.parcel import Parcel, Part, allocate, pack, unpack
from dask_devctx.worker.packing import find, find_views, is_array

# The kind and the details of each part, and the number of buffers.
About = tuple[list[tuple[str, Any]], int]
_POLL_S: Final = 1e-4
# A view that is larger than this part of its allocation leaves with all of it.
_LARGE: Final = 0.5
# The driver alone is as fast with less of ordinary memory.
_FEW_NBYTES: Final = 16 * 2**20


@dataclass(eq=False, kw_only=True)
class HostForm(Parcel):
    """A value packed in host memory: there are its ``parts``, which were on the device ``home``."""

    home: Device

    @property
    def nbytes(self) -> int:
        """The bytes that it has on a device."""
        return sum(part.nbytes for part in self.parts)

    @property
    def host_nbytes(self) -> int:
        """The bytes of host memory."""
        return self.nbytes + len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)

    def on_device(self, device: Device) -> tuple[Any, Stamp]:
        """Return the value on a device, and the stamp of the copy; does not wait for it."""
        with device:
            memory, pointers = allocate((part.description for part in self.parts), device)
            stream = copy_streams.shared(device, "in")
            try:
                # The libraries reuse memory that earlier work in their streams still reads.
                stream.after_current_streams()
                for pointer, part in zip(pointers, self.parts, strict=True):
                    if part.owner.is_page_locked or part.nbytes < _FEW_NBYTES:
                        stream.copy_in(pointer, part.pointer, part.nbytes)
                    else:
                        stream.wait()
                        copy_ordinary(device, pointer, part.pointer, part.nbytes)
            finally:  # after an error, too, copies may be under way
                stamp = Stamp({device: (stream.reached(),)})
                hold(stamp, self, memory)
            if any(part.kind == "jax" for part in self.parts):
                wait_for(stamp)  # JAX does not reveal the streams that read it
            else:
                stamp.hold_back(device)  # unpickling may compute
            return unpack(self.pickled, self.buffers, memory), stamp

    # -- to other processes, and to disk

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be the value itself in another process, such as that of a process pool."""
        return arrived, (self.about, [*map(bytes, self.frames)])

    @property
    def about(self) -> About:
        """What :meth:`of_frames` needs beside the frames."""
        return [(part.kind, part.detail) for part in self.parts], len(self.buffers)

    @property
    def frames(self) -> list[Any]:
        """The bytes of the value."""
        return [self.pickled, *self.buffers, *(part.owner.contents for part in self.parts)]

    @classmethod
    def of_frames(cls, about: About, frames: Sequence[Any], home: Device) -> HostForm:
        """Return a value that arrived as its frames."""
        kinds, n_buffers = about
        pickled, *rest = map(writeable, frames)
        parts = []
        for (kind, detail), block in zip(kinds, map(block_of, rest[n_buffers:]), strict=True):
            parts.append(Part(block.address, block.nbytes, kind, detail, block, on_host=True))
        return cls(bytes(pickled), rest[:n_buffers], parts, home=home)


class Copying:
    """The host form of a value on a device, whose copies are under way; finish or drop it.

    The value is copied after the work that makes it.
    """

    def __init__(
        self,
        value: Any,
        device: Device,
        after: Stamp,
        take: Callable[[int], HostBlock],
        *,
        sent: bool = False,
    ) -> None:
        # A piece of an array is a view, which holds all memory of the array that it was cut from.
        # If small pieces came back as such, a task that joins pieces of many arrays would need the
        # memory of all of them. So they leave as arrays of their own. The copies that make pieces
        # dense would spoil a graph that another thread captures.
        self.begun_at = time.perf_counter()
        memory = memory_of(value) if is_array(value) else None
        dense = memory is not None and value.nbytes <= memory.nbytes * _LARGE
        dense = dense and value.dtype.kind != "V" and not is_captured(device)
        dense = dense or sent  # then each array arrives in memory of its own
        with device:
            after.hold_back_readers()  # for types that are pickled by their own code
            try:
                packed = pack(value, find if dense else find_views)
            except Exception as error:
                if not dense or not is_out_of_memory(error):
                    raise
                packed = pack(value, find_views)
            self._packed: Parcel | None = packed  # may have memory that the copy reads
            parts = []
            with copy_streams.taken(device) as self._stream:
                self._stream.after(after)
                if packed.gathered:
                    self._stream.after_current_streams()
                for part in packed.parts:
                    block = take(part.nbytes)
                    self._stream.copy_out(block.address, part.pointer, part.nbytes)
                    parts.append(replace(part, pointer=block.address, owner=block, on_host=True))
        self.form = HostForm(packed.pickled, packed.buffers, parts, home=device)

    def finish(self) -> HostForm:
        """Return the host form when its copies are done."""
        copy_streams.finish(self._stream)
        self._packed = None
        return self.form

    def drop(self) -> None:
        """Wait for the copies, whose result is not needed."""
        copy_streams.drop(self._stream)


def wait_for(stamp: Stamp) -> None:
    """Wait until the work of a stamp is done."""
    while not stamp.done():
        time.sleep(_POLL_S)


# In a process to which dask sends a host form, this is the value itself.


@dask_serialize.register(HostForm)  # type: ignore[untyped-decorator]
def _to_process(form: HostForm) -> tuple[dict[str, Any], list[Any]]:
    return {"about": pickle.dumps(form.about)}, form.frames


@dask_deserialize.register(HostForm)  # type: ignore[untyped-decorator]
def _from_process(header: dict[str, Any], frames: list[Any]) -> Any:
    return arrived(pickle.loads(header["about"]), frames)


def send_as_host_forms(*kinds: type) -> None:
    """Let dask send values of types as host forms from any process, where they are on devices."""

    def pack(theirs: Any, value: Any) -> tuple[dict[str, Any], list[Any]]:
        places = nbytes_by_device(value)
        if not places:
            return theirs(value)  # type: ignore[no-any-return]
        work, device = Stamp.of_devices(places), next(iter(places))
        take = PageLockedPool(device, 0).take  # ordinary memory
        form = Copying(value, device, work, take, sent=True).finish()
        return _to_process(form)  # type: ignore[no-any-return]

    def unpack(theirs: Any, header: dict[str, Any], frames: list[Any]) -> Any:
        return _from_process(header, frames) if "about" in header else theirs(header, frames)

    for registry, ours in ((dask_serialize, pack), (dask_deserialize, unpack)):
        for kind in kinds:
            registry.register(kind, functools.partial(ours, registry.dispatch(kind)))


@functools.cache
def _register_torch() -> None:
    """Send torch's values so: dask takes the memory of a client's tensors for the host's."""
    import torch

    import_module("distributed.protocol.torch")  # registers dask's own functions first
    send_as_host_forms(torch.Tensor, torch.nn.Module)


for _registry in (dask_serialize, dask_deserialize):
    _registry.register_lazy("torch", _register_torch)  # in place of dask's
if "distributed.protocol.torch" in sys.modules:
    _register_torch()


def arrived(about: About, frames: list[Any]) -> Any:
    """Return a value that left another process as its host form, on the current device."""
    try:
        device = Device.current() or Device(0)
        value, stamp = HostForm.of_frames(about, frames, device).on_device(device)
    except Exception as error:
        if isinstance(error, DriverUnavailableError) or is_out_of_memory(error):
            error.add_note(
                "The process that gets the value has no GPU, or no room there. Get values in "
                'host memory by client.gather(client.map(to_device, futures, device="cpu"))'
            )
        raise
    wait_for(stamp)  # any thread may use it next
    return value


def writeable(frame: Any) -> memoryview:
    """Return the bytes of a frame, copied if they cannot be written to."""
    view = memoryview(frame)
    return memoryview(bytearray(view)) if view.readonly else view


def block_of(frame: memoryview) -> HostBlock:
    """Return the memory of a frame as a block."""
    view = frame.cast("B") if frame.nbytes else memoryview(bytearray(1))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return HostBlock(view, address, frame.nbytes, is_page_locked=False)
