"""Where data that arrives from elsewhere is unpacked: on a device that the worker uses."""

from __future__ import annotations

from collections.abc import Sequence

from distributed import Worker

from dask_devctx.cuda.device import Device


class Arrivals:
    """While it is open, what a worker receives does not land on a device that is not its own.

    Libraries unpack an array on their default device, CUDA's first, where no other is current. A
    worker that does not use the first one has one of its own made current on the threads that
    unpack: the event loop's, and that of the ``offload`` executor.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    devices
        The devices that it uses.
    """

    def __init__(self, worker: Worker, devices: Sequence[Device]) -> None:
        self._offload = worker.executors["offload"]
        self._device: Device | None = None
        if devices and all(device.device_id != 0 for device in devices):
            self._device = devices[0]
            # For good, and no scope: several workers of one process open and close in any order.
            self._device.set_current()
            self._offload.submit(self._device.set_current)

    def close(self) -> None:
        """Leave no device current on either thread, unless somebody else made another so."""
        if self._device is not None:
            _unset(self._device)
            self._offload.submit(_unset, self._device)
            self._device = None


def _unset(device: Device) -> None:
    """Leave nothing current on this thread, where its current context is the device's primary."""
    if device.primary_context.is_current:
        device.unset_current()
