"""The device that is current where data arrives, so that a worker uses no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from distributed import Worker

from dask_devctx.cuda.device import Device


def in_place_of_the_first(devices: Sequence[Device]) -> Device | None:
    """Return one of the devices for libraries that would begin to use CUDA's first.

    None if CUDA's first is among them.
    """
    uses_the_first = any(device.device_id == 0 for device in devices)
    return None if uses_the_first or not devices else devices[0]


@contextmanager
def landing_on(worker: Worker, devices: Sequence[Device]) -> Iterator[None]:
    """While it is open, data that a worker receives arrives only on the worker's own devices."""
    # Libraries pack, unpack and free an array on their default device, CUDA's first, if no other
    # device is current, and so begin to use it. So one of the worker's devices is current on the
    # threads that do so: those of the event loop and of the ``offload`` executor. Tasks that are
    # not for a device do not see it: see `HostRun`.
    device, offload = in_place_of_the_first(devices), worker.executors["offload"]
    if device is None:
        yield
        return
    # Set without a scope: several workers of one process open and close in any order.
    device.set_current()
    offload.submit(device.set_current)
    try:
        yield
    finally:
        _unset(device)
        with suppress(RuntimeError):  # the interpreter ends, and took the thread down before
            offload.submit(_unset, device)


def _unset(device: Device) -> None:
    if device.primary_context.is_current:  # else other code made another one current
        device.unset_current()
