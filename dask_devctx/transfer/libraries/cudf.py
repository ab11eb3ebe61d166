"""cuDF's frames, series and indices: libcudf is made for one device per process.

They can be located, but never move. A second device in a process raises an error here, before
libcudf fails with an error that explains nothing.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import cudf

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.move import to_device


class _Process:
    """The one device of this process that has cuDF's objects."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._lock = threading.Lock()

    def device(self) -> Device:
        here = Device.current()
        with self._lock:
            if self._device is None:
                self._device = here or Device(0)
        if here is not None and here is not self._device:
            raise _two_devices(self._device, here)
        return self._device


_process = _Process()


def _bytes(value: Any) -> dict[Device, int]:
    usage = value.memory_usage()
    nbytes = usage if isinstance(usage, int) else usage.sum()
    return {_process.device(): int(nbytes)}


def _to_device(value: Any, device: Device) -> NoReturn:
    raise _two_devices(_process.device(), device)


def _two_devices(used: Device, wanted: Device) -> DevctxError:
    return DevctxError(
        f"cuDF uses one device in a process, here {used}, and was to use {wanted}. Start a worker "
        "for each device: LocalDeviceCluster(), n_workers= the number of devices, or "
        "devctx.devices-per-worker: 1"
    )


def register() -> None:
    """Make cuDF's objects known."""
    for name in ("DataFrame", "Series", "Index"):
        kind = getattr(cudf, name)
        nbytes_by_device.register(kind, _bytes)
        to_device.register(kind, _to_device)
