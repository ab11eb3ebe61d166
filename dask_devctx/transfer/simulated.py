"""Simulated arrays, as an example of what a library's part is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_devctx.device import Device
from dask_devctx.transfer.move import to_device
from dask_devctx.transfer.where import device_of

if TYPE_CHECKING:
    from dask_devctx.simulated_array import SimulatedArray


def _device_of(array: SimulatedArray) -> Device:
    return array.device


def _to_device(array: SimulatedArray, device: Device) -> SimulatedArray:
    return array.copy_to(device)


def register() -> None:
    """Make :class:`~dask_devctx.simulated_array.SimulatedArray` known."""
    try:
        from dask_devctx.simulated_array import SimulatedArray
    except ImportError:  # no NumPy, so no value of it: some other type of this package was asked
        return
    device_of.register(SimulatedArray, _device_of)
    to_device.register(SimulatedArray, _to_device)
