"""Data that a worker receives and sends: its device on arrival, and its order after its work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from distributed import Worker

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import wrapped_handler
from dask_devctx.worker.inputs.inputs import Inputs

_POLL_S = 0.001


def in_place_of_the_first(devices: Sequence[Device]) -> Device | None:
    """Return one of the devices for libraries that would begin to use CUDA's first; None if it is
    among them.
    """
    uses_the_first = any(device.device_id == 0 for device in devices)
    return None if uses_the_first or not devices else devices[0]


@contextmanager
def landing_on(worker: Worker, devices: Sequence[Device]) -> Iterator[None]:
    """While it is open, data that a worker receives arrives only on the worker's own devices.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    devices
        The devices that it uses.

    Notes
    -----
    Libraries pack, unpack and free an array on their default device, CUDA's first, if no other
    device is current, and so begin to use it. For a worker that does not use the first device, this
    makes one of the worker's devices current on the threads that do so: the event loop's thread,
    and that of the ``offload`` executor. When this closes, no device is current on these threads,
    unless other code made another one current.

    Tasks that are not for a device do not see it: see
    :class:`~dask_devctx.worker.host_task.HostTask`.
    """
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
    """Unset this thread's current context, if it is the device's primary context."""
    if device.primary_context.is_current:
        device.unset_current()


@contextmanager
def leaving_after_its_work(worker: Worker, inputs: Inputs) -> Iterator[None]:
    """While it is open, a worker reads the data that it sends after the work that makes the data.

    Parameters
    ----------
    worker
        The worker.
    inputs
        Knows the work that makes each value.

    Notes
    -----
    dask serializes the values on the threads of the event loop and of the ``offload`` executor,
    whose current streams are the libraries' default streams. These do not wait for a stream that a
    task made for itself: a read could come before the task's write.

    Each wrapper around ``get_data`` is a separate step, like this one. The wrapper that is opened
    last is called first.
    """

    def after_its_work(get_data: Callable[..., Any]) -> Callable[..., Any]:
        async def get_data_after_its_work(
            comm: Any, keys: Collection[Hashable], **kwargs: Any
        ) -> Any:
            after = inputs.stamps_of(keys)
            while not all(made.may_be_read() for made in after):  # a graph is being captured
                await asyncio.sleep(_POLL_S)
            for made in after:
                made.hold_back_readers()
            return await get_data(comm, keys=keys, **kwargs)

        return get_data_after_its_work

    with wrapped_handler(worker, "get_data", after_its_work):
        yield
