"""A value with device memory that dask keeps: on its devices, or in host memory."""

from __future__ import annotations

import asyncio
import pickle
import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

from distributed.protocol.serialize import dask_deserialize, dask_serialize
from distributed.sizeof import safe_sizeof

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import Stamp
from dask_devctx.transfer.location import Memory
from dask_devctx.worker.values.host_form import HostForm

# The `value` of one in host memory.
AWAY: Final = object()
_POLL_S: Final = 0.001


class Entry(weakref.ref["Value"]):
    """A value in the accounts of its devices; this outlives the value, to be counted off then.

    The value must not be found any more at that time: a ``__del__`` would run while other threads
    can still take it up by a weak reference.
    """

    __slots__ = ("away", "memories")

    away: tuple[Device, int] | None  # in host memory: where it is counted, and its bytes
    memories: frozenset[Memory]  # on devices: its allocations


class Value:
    """One value and all that is known of it; it stands for the value in the worker's data.

    The lock of its ``spill`` guards all but ``released``; :class:`Copies` has a lock for its own.
    """

    __slots__ = (
        *("__weakref__", "copies", "entry", "form", "key", "moving", "nbytes"),
        *("pins", "released", "spill", "stamp", "stays", "touched", "value"),
    )

    def __init__(
        self,
        key: Hashable,
        value: Any,
        nbytes: Mapping[Device, int],
        stamp: Stamp | None = None,
    ) -> None:
        self.key = key
        self.value = value
        self.nbytes = nbytes  # by device; empty in host memory
        self.stamp = stamp  # of the work that makes it, or of the copy that restored it
        self.spill: Any = None  # the `Spill` that counts it
        self.entry: Any = None  # the `Entry` that counts it
        # The value in host memory; kept while it is on the device again and this is right.
        self.form: HostForm | None = None
        self.touched = 0  # grows with each use
        self.pins = 0  # users that need it on its device
        self.moving = threading.Lock()  # held by the thread that brings it to a device
        self.stays = False  # whether it cannot leave
        self.released = False  # by dask: its key may have another value, and no copy is kept
        self.copies: dict[Device, Any] = {}  # on other devices

    @classmethod
    def away(cls, key: Hashable, form: HostForm) -> Self:
        """Return a value that is in host memory only."""
        value = cls(key, AWAY, {})
        value.form = form
        return value

    @property
    def is_away(self) -> bool:
        """Whether the value is in host memory only."""
        return self.value is AWAY

    def work(self) -> Stamp:
        """Return the stamp of the work that makes the value, which is on its devices."""
        if self.stamp is None:  # it came from elsewhere, or was there before
            self.stamp = Stamp.of_devices(self.nbytes)
        return self.stamp

    def __sizeof__(self) -> int:
        # dask asks for it: only host memory counts towards the worker's limit.
        while (value := self.value) is AWAY:
            form = self.form
            if form is not None:
                return form.host_nbytes  # if not, it is restored just now
        return int(max(safe_sizeof(value) - sum(self.nbytes.values()), 0))

    def host_form(self) -> HostForm:
        """Return the value's host form, which is made if the value is on its device."""
        form: HostForm = self.form or self.spill.copied(self)
        return form

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.host_form().__reduce_ex__(protocol)


async def readable(values: Iterable[Value]) -> None:
    """Return when the event loop can read some values without a wait."""
    for value in values:
        while (stamp := value.stamp) is not None and not stamp.may_be_read():  # it may leave
            await asyncio.sleep(_POLL_S)  # a graph is being captured


# dask's data on disk: a value comes back from there into host memory.


@dask_serialize.register(Value)  # type: ignore[untyped-decorator]
def _to_disk(value: Value) -> tuple[dict[str, Any], list[Any]]:
    form = value.host_form()
    if value.copies:  # they keep it, and nobody finds it any more
        value.spill.copies.drop_later(value)
    return {"value": pickle.dumps((value.key, form.about, form.home.uuid))}, form.frames


@dask_deserialize.register(Value)  # type: ignore[untyped-decorator]
def _from_disk(header: dict[str, Any], frames: list[Any]) -> Value:
    key, about, uuid = pickle.loads(header["value"])
    home = Device.current() or Device(0)  # in another machine's process
    with suppress(DevctxError):
        home = Device(uuid)
    return Value.away(key, HostForm.of_frames(about, frames, home))
