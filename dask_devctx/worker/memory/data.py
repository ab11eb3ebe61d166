"""A worker's data: dask's own mapping, with values that may be in host memory meanwhile."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Hashable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from distributed import Worker

from dask_devctx.dask_internals.tasks import TaskStandIn
from dask_devctx.transfer import walk
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.manager import DeviceMemory

logger = logging.getLogger(__name__)

# How the reads of this context serialize values in host memory, which stay there: "value" for a
# receiver that gets the value itself, "kept" for one that takes a `Kept`; empty for other reads.
SENDING: Final[ContextVar[str]] = ContextVar("devctx-sending", default="")
_EXECUTE: Final = inspect.unwrap(Worker.execute).__code__


class DeviceData(MutableMapping[Hashable, Any]):
    """A worker's data whose values on devices may be moved to host memory and back.

    Parameters
    ----------
    data
        The worker's data, a dictionary or a ``SpillBuffer``.
    memory
        Moves the values.

    Notes
    -----
    Every reader gets the value itself, on its device. There are two exceptions. The worker that
    prepares a task gets a :class:`Kept`, which the task's stand-in resolves on the task's thread
    and device. The worker that sends values gets a :class:`Sent`, which is the value itself in the
    receiver's process.
    """

    def __init__(self, data: MutableMapping[Any, Any], memory: DeviceMemory) -> None:
        self.raw: MutableMapping[Any, Any] = data
        self.on_devices: dict[Hashable, Kept] = {}
        self.memory = memory
        if isinstance(data, DeviceData):  # of a plugin that was removed while values were away
            self.raw = data.raw
            self.on_devices = data.on_devices
            for kept in [*self.on_devices.values(), *getattr(self.raw, "fast", self.raw).values()]:
                if kept.__class__ is Kept:
                    memory.take_over(kept)
            return
        for key, value in list(getattr(data, "fast", data).items()):
            if walk.find(value.__class__) is not None:
                kept = memory.keep(key, value)
                if kept is not None:
                    self.on_devices[key] = kept
                    del data[key]

    def keep_on(self) -> bool:
        """Give the values on devices back to dask's mapping.

        Returns
        -------
        bool
            Whether some values are in host memory or on disk, so that this is still needed.
        """
        for key, kept in list(self.on_devices.items()):
            value = kept.value  # read once: a thread may just be moving it
            if value is AWAY:
                self.moved(kept)
            else:
                self.raw[key] = value
                del self.on_devices[key]
        if self.on_devices or (self.memory.on_disk and len(getattr(self.raw, "slow", ()))):
            return True
        return any(
            value.__class__ is Kept for value in getattr(self.raw, "fast", self.raw).values()
        )

    def __getitem__(self, key: Hashable) -> Any:
        value = self.on_devices.get(key)
        if value is None:
            value = self.raw[key]
            if value.__class__ is not Kept:
                return value
        if value.memory is None:  # read from disk
            self.memory.adopt(value)
        if sending := SENDING.get():
            return self.memory.to_send(value, whole=sending == "kept")
        if _goes_to_a_stand_in(sys._getframe(1)):
            return value
        return self.memory.read(value)

    def __setitem__(self, key: Hashable, value: Any) -> None:
        kept = None
        self._release(key)
        if value.__class__ is Kept:  # it comes from another worker, in host memory
            self.memory.adopt(value)
        elif walk.find(value.__class__) is not None:
            kept = self.memory.keep(key, value)
        if kept is None:
            if self.on_devices:
                self.on_devices.pop(key, None)
            self.raw[key] = value
        else:
            if key in self.raw:
                del self.raw[key]
            self._put(kept)

    def _put(self, kept: Kept) -> None:
        """Store a value that is on devices: with dask's own if it has much host memory, too."""
        if kept.has_host_memory:
            self.raw[kept.key] = kept  # dask counts the host memory, and writes it to disk
        else:
            self.on_devices[kept.key] = kept

    def _release(self, key: Hashable) -> None:
        """Note that the value of a key, if there is one, is no longer the key's."""
        kept = self.on_devices.get(key) or getattr(self.raw, "fast", self.raw).get(key)
        if kept.__class__ is Kept:
            kept.released = True

    def __delitem__(self, key: Hashable) -> None:
        self._release(key)
        kept = self.on_devices.pop(key, None)
        if kept is None or key in self.raw:
            del self.raw[key]

    def __contains__(self, key: object) -> bool:
        return key in self.on_devices or key in self.raw

    def __iter__(self) -> Iterator[Hashable]:
        yield from [*self.on_devices]
        yield from self.raw

    def __len__(self) -> int:
        return len(self.on_devices) + len(self.raw)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} values>"

    def __getattr__(self, name: str) -> Any:
        # dask asks its SpillBuffer for more than a mapping has, and a dictionary for less.
        if name.startswith("__") or name == "raw":
            raise AttributeError(name)
        return getattr(self.raw, name)

    def evict(self) -> int:
        """Write a value in host memory to disk, as dask's own mapping does; -1 if none is there."""
        if self.memory.spill_clean(1):
            return 1
        return int(self.raw.evict()) if self.raw.fast else -1  # type: ignore[attr-defined]

    def peek(self, key: Hashable) -> Any:
        """Return a value that is in memory, or its :class:`Kept`; None for one on disk."""
        kept = self.on_devices.get(key)
        if kept is not None:
            return kept
        value = getattr(self.raw, "fast", self.raw).get(key)
        if value.__class__ is Kept and value.memory is None:
            self.memory.adopt(value)
        return value

    def moved(self, kept: Kept) -> None:
        """Show dask a value that has moved as host data, or no longer; on the event loop."""
        key = kept.key
        if kept.is_away:
            if self.on_devices.get(key) is kept:
                try:
                    self.raw[key] = kept  # dask may write it to disk
                except Exception:  # and fails; the value stays here, uncounted
                    logger.warning("%r cannot go to disk", key, exc_info=True)
                    return
                del self.on_devices[key]
            elif kept.has_host_memory and getattr(self.raw, "fast", self.raw).get(key) is kept:
                self.raw[key] = kept  # dask counts it again
        elif getattr(self.raw, "fast", self.raw).get(key) is kept:
            del self.raw[key]
            self._put(kept)


def _goes_to_a_stand_in(reader: Any) -> bool:
    """Return whether dask reads an input of a task that has a stand-in."""
    if reader.f_code is not _EXECUTE:
        return False
    ts = reader.f_locals.get("ts")
    return isinstance(getattr(ts, "run_spec", None), TaskStandIn)
