"""A worker's way in and out for data: where it lands, and when it may leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distributed import Worker

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import wrapped_handler
from dask_devctx.worker.inputs import Inputs


@contextmanager
def landing_on(worker: Worker, devices: Sequence[Device]) -> Iterator[None]:
    """While it is open, data that a worker receives lands on no device that is not its own.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    devices
        The devices that it uses.

    Notes
    -----
    Libraries unpack an array on their default device, CUDA's first, where no other is current. A
    worker that does not use the first one has one of its own made current on the threads that
    unpack: the event loop's, and that of the ``offload`` executor. Afterwards no device is current
    on either, unless somebody else made another so.
    """
    if not devices or any(device.device_id == 0 for device in devices):
        yield
        return
    device, offload = devices[0], worker.executors["offload"]
    # For good, and no scope: several workers of one process open and close in any order.
    device.set_current()
    offload.submit(device.set_current)
    try:
        yield
    finally:
        _unset(device)
        offload.submit(_unset, device)


def _unset(device: Device) -> None:
    """Leave nothing current on this thread, where its current context is the device's primary."""
    if device.primary_context.is_current:
        device.unset_current()


@contextmanager
def leaving_after_its_work(worker: Worker, inputs: Inputs) -> Iterator[None]:
    """While it is open, data that a worker sends is read after the work that makes it.

    Parameters
    ----------
    worker
        The worker.
    inputs
        Knows that work.

    Notes
    -----
    dask serializes the values on the threads of the event loop and of the ``offload`` executor,
    whose current streams are the libraries' default ones. They know nothing of a stream that a task
    made for itself, and would read before it has written.

    Each function around ``get_data`` is a step of its own, like this one; the last to be opened is
    the first to be called.
    """

    def after_its_work(get_data: Callable[..., Any]) -> Callable[..., Any]:
        async def get_data_after_its_work(
            comm: Any, keys: Collection[Hashable], **kwargs: Any
        ) -> Any:
            inputs.hold_back_for(keys)
            return await get_data(comm, keys=keys, **kwargs)

        return get_data_after_its_work

    with wrapped_handler(worker, "get_data", after_its_work):
        yield
