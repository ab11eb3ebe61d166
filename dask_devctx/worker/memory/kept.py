"""One value with device memory that dask keeps: on its device, or in host memory."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from distributed.protocol.serialize import dask_deserialize, dask_serialize
from distributed.sizeof import safe_sizeof

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import walk
from dask_devctx.worker.memory.host_form import HostForm, Sent, _block_of

if TYPE_CHECKING:
    from dask_devctx.transfer import Stamp
    from dask_devctx.transfer.blocks import Memory
    from dask_devctx.worker.memory.books import Books
    from dask_devctx.worker.memory.manager import DeviceMemory

AWAY: Final = object()
_LITTLE_NBYTES: Final = 64 * 2**10


class Kept:
    """Stands for a value in a worker's data, which returns the value itself to its readers.

    Parameters
    ----------
    key
        The value's key.
    value
        The value, or ``AWAY``.
    memory
        The manager that may move it.

    Attributes
    ----------
    form, index
        The value in host memory, and its index there; also while the value is on its device, if
        the host form is still right.
    places
        The bytes on each device; empty for a value in host memory.
    memories
        The allocations that count for it.
    after
        The stamp of the copy that brought it back; None for a value that never left.
    touched
        A number that grows with each use.
    pins
        How many users need it on its device.
    leaving
        Whether it is being copied to the host.
    stays
        Whether it cannot leave.
    released
        Whether dask has released it: its key may have another value, while a task still has this.
    counted
        What the books count for it, and count off after its end; None before they count it.
    """

    __slots__ = (
        *("__weakref__", "after", "counted", "form", "index", "key", "leaving", "memories"),
        *("memory", "pins", "places", "released", "stays", "touched", "value"),
    )

    def __init__(self, key: Hashable, value: Any, memory: DeviceMemory | None) -> None:
        self.key = key
        self.value = value
        self.memory = memory
        self.form: HostForm | None = None
        self.index = 0
        self.places: Mapping[Device, int] = {}
        self.memories: frozenset[Memory] = frozenset()
        self.after: Stamp | None = None
        self.touched = 0
        self.pins = 0
        self.leaving = False
        self.stays = False
        self.released = False
        self.counted: Any = None

    @property
    def books(self) -> Books:
        """The books that count it."""
        assert self.memory is not None
        return self.memory.books

    @property
    def has_host_memory(self) -> bool:
        """Whether the value has more than a little host memory beside its device memory."""
        value = self.value
        if value is AWAY or walk.find(value.__class__) is walk.LEAF:
            return False
        return self.__sizeof__() > _LITTLE_NBYTES

    @property
    def is_away(self) -> bool:
        """Whether the value is in host memory only."""
        return self.value is AWAY

    def __sizeof__(self) -> int:
        # dask asks for it: only host memory counts towards the worker's limit.
        while (value := self.value) is AWAY:
            form = self.form
            if form is not None:
                return form.host_nbytes  # if not, it comes back just now
        return int(max(safe_sizeof(value) - sum(self.places.values()), 0))

    def host_form(self) -> tuple[HostForm, int]:
        """Return the value's host form, which is made if the value is on its device."""
        memory = self.memory
        if memory is None:  # it was read from disk
            assert self.form is not None
            return self.form, self.index
        with memory.books.lock:
            form, index = self.form, self.index
        return (memory.copied(self), 0) if form is None else (form, index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be the value itself in another process, such as that of a process pool."""
        return Sent(*self.host_form()).__reduce_ex__(protocol)


# dask's data on disk: a value comes back from there into host memory.


@dask_serialize.register(Kept)  # type: ignore[untyped-decorator]
def _to_disk(kept: Kept) -> tuple[dict[str, Any], list[Any]]:
    form, index = kept.host_form()
    if kept.memory is not None:
        kept.memory.on_disk = True
    about = (kept.key, form.descriptions, len(form.buffers), index, form.home.uuid)
    return {"kept": pickle.dumps(about)}, [form.pickled, *form.frames()]


@dask_deserialize.register(Kept)  # type: ignore[untyped-decorator]
def _from_disk(header: dict[str, Any], frames: list[Any]) -> Kept:
    key, descriptions, n_buffers, index, uuid = pickle.loads(header["kept"])
    pickled, *rest = frames
    parts = [
        (description, _block_of(frame))
        for description, frame in zip(descriptions, rest[n_buffers:], strict=True)
    ]
    kept = Kept(key, AWAY, None)
    home = Device.current() or Device(0)  # in another machine's process
    with suppress(DevctxError):
        home = Device(uuid)
    kept.form = HostForm(bytes(pickled), rest[:n_buffers], parts, home)
    kept.index = index
    return kept
