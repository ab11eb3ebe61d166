"""cuDF's frames, series and indices: libcudf is made for one device per process.

They can be located, but never move. A second device in a process raises an error here, before
libcudf fails with an error that explains nothing.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import cudf

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.libraries import known


@functools.cache
def _home() -> Device:
    """Return the one device of this process that has cuDF's objects: that of the first."""
    return Device.current() or Device(0)


def _device() -> Device:
    home, here = _home(), Device.current()
    if here not in (None, home):
        raise _two_devices(home, here)
    return home


def _bytes(value: Any) -> dict[Device, int]:
    usage = value.memory_usage()
    return {_device(): int(usage if isinstance(usage, int) else usage.sum())}


def _to_device(value: Any, device: Device) -> NoReturn:
    raise _two_devices(_device(), device)


def _two_devices(used: Device, wanted: Device | None) -> DevctxError:
    return DevctxError(
        f"cuDF uses one device in a process, here {used}, and was to use {wanted}. Start a worker "
        "for each device: LocalDeviceCluster(), n_workers= the number of devices, or "
        "devctx.devices-per-worker: 1"
    )


for _name in ("DataFrame", "Series", "Index"):
    known(getattr(cudf, _name), nbytes=_bytes, move=_to_device)
