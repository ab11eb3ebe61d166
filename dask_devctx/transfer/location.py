"""Where a value lives: ``device_of`` and ``nbytes_by_device``."""

from __future__ import annotations

import functools
import threading
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.containers import BUILT_IN, Container, DataclassLike
from dask_devctx.transfer.registry import Registry


def _unknown(value: object) -> None:
    return None


def _nothing(value: object) -> dict[Device, int]:
    return {}


class DeviceOf(Registry):
    """The type of :data:`device_of`, a function: where a value lives. Its call is below."""

    def __init__(self) -> None:
        super().__init__("device_of", _unknown)

    def __call__(self, value: object) -> Device | None:
        """Return the device that a value lives on, or None where it lives on none.

        Parameters
        ----------
        value
            Anything. Lists, tuples, dictionaries, sets and dataclasses are looked into.

        Returns
        -------
        Device or None
            Of a value that is spread over several devices, the one that has most of its bytes;
            the lower ordinal where they have the same.

        Notes
        -----
        A type is made known with ``device_of.register(T)``: the function is given the value and
        returns what :class:`~dask_devctx.Device` accepts, or None. Such a value is taken to live
        on that one device, with the bytes that its attribute ``nbytes`` says; without one, with
        those of the parts that the function calls ``device_of`` for. No library is imported, and
        no context created.

        Examples
        --------
        >>> from dask_devctx.simulated_array import SimulatedArray
        >>> with Device(1):
        ...     x = SimulatedArray((2, 2))
        >>> device_of({"x": x, "y": 1}) is Device(1)
        True
        >>> device_of("host") is None
        True
        """
        found = nbytes_by_device(value)
        parts = _thread.parts
        if parts is not None:
            for device, nbytes in found.items():
                parts[device] = parts.get(device, 0) + nbytes
        if len(found) < 2:
            return next(iter(found), None)
        return max(found, key=lambda device: (found[device], -device.device_id))


class BytesByDevice(Registry):
    """The function that :data:`nbytes_by_device` is."""

    def __init__(self) -> None:
        super().__init__("nbytes_by_device", _nothing)

    def __call__(self, value: object) -> dict[Device, int]:
        """Return how many bytes a value has on which devices; empty for what is on the host.

        Parameters
        ----------
        value
            Anything; looked into as :data:`device_of` does.

        Notes
        -----
        Cheap enough for every task's inputs: of a list or dictionary of more than a hundred
        items, a hundred are looked at and the bytes scaled up.
        """
        count = self.find(type(value))
        return {} if count is None else count(value)

    def _look_up(self, kind: type) -> Any:
        # One registered with ``device_of`` will do.
        count = super()._look_up(kind)
        if count is None:
            if device_of.find(kind) is not None:
                return _on_one_device
            if hasattr(kind, "__dataclass_fields__"):
                self.register(kind, functools.partial(count_parts, DataclassLike(kind)))
                return super()._look_up(kind)
        return count


def _on_one_device(value: Any) -> dict[Device, int]:
    parts: dict[Device, int] = {}
    before, _thread.parts = _thread.parts, parts
    try:
        which = device_of.dispatch(type(value))(value)
    finally:
        _thread.parts = before
    if which is None:
        return {}
    device = Device(which)
    nbytes = getattr(value, "nbytes", None)
    return {device: parts.get(device, 0) if nbytes is None else int(nbytes)}


class _Thread(threading.local):
    def __init__(self) -> None:
        self.seen: set[int] = set()
        # The bytes of what a registered function has asked ``device_of`` for, while it runs.
        self.parts: dict[Device, int] | None = None


_thread = _Thread()


def count_parts(container: Container, value: Any) -> dict[Device, int]:
    """Return the bytes of what is in a container; what is in it twice counts once."""
    parts, scale = container.sample(value)
    if nbytes_by_device.all_plain(parts):
        return {}
    seen = _thread.seen
    if id(value) in seen:
        return {}
    outermost = not seen
    seen.add(id(value))
    total: dict[Device, int] = {}
    try:
        for part in parts:
            if id(part) not in seen:
                counted = nbytes_by_device(part)
                if counted:
                    seen.add(id(part))
                for device, nbytes in counted.items():
                    total[device] = total.get(device, 0) + nbytes
    finally:
        if outermost:
            seen.clear()
    return {device: round(nbytes * scale) for device, nbytes in total.items()}


device_of = DeviceOf()
nbytes_by_device = BytesByDevice()

for _kind, _container in BUILT_IN.items():
    nbytes_by_device.register(_kind, functools.partial(count_parts, _container))
