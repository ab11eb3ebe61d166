"""Data that a worker receives and sends: its device on arrival, and its order after its work."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from distributed import Worker

from dask_devctx import driver
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.serialization import wrapped_serialization
from dask_devctx.dask_internals.worker import wrapped_handler
from dask_devctx.errors import DevctxError
from dask_devctx.worker.inputs import Inputs


class _Landing(NamedTuple):
    """The device for the values that the threads of one worker pack and unpack."""

    device: Device
    threads: set[int]

    def add_this_thread(self) -> None:
        self.threads.add(threading.get_ident())


_landings: list[_Landing] = []
_lock = threading.Lock()
_wrapped = ExitStack()


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
    Libraries unpack an array on their default device, CUDA's first, if no other device is current;
    some pack it by way of that device, too. For a worker that does not use the first device, one of
    the worker's devices is current while distributed packs or unpacks a value on the threads that
    do this: the event loop's thread, and that of the ``offload`` executor. Before and after,
    nothing is current there.
    """
    if not devices or any(device.device_id == 0 for device in devices):
        yield
        return
    with devices[0]:  # its context is made now: a device that has no room for one is told of here
        pass
    landing = _Landing(devices[0], {threading.get_ident()})
    worker.executors["offload"].submit(landing.add_this_thread)
    with _lock:  # once in a process, however many workers open and close, in any order
        if not _landings:
            _wrapped.enter_context(wrapped_serialization(_on_the_threads_device))
        _landings.append(landing)
    try:
        yield
    finally:
        with _lock:
            _landings.remove(landing)
            if not _landings:
                _wrapped.close()


def _on_the_threads_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the thread's device current during a call of ``function``."""

    @functools.wraps(function)
    def on_the_threads_device(*args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        device = next((each.device for each in tuple(_landings) if thread in each.threads), None)
        if device is None or not _made_current(device):
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            with suppress(DevctxError):
                device.unset_current()

    return on_the_threads_device


def _made_current(device: Device) -> bool:
    """Make a device current if nothing is; return whether this succeeded."""
    try:
        if driver.backend().current_context():
            return False
        device.set_current()
    except DevctxError:  # most values can be read all the same, and the users of the device see it
        return False
    return True


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
            inputs.hold_back_for(keys)
            return await get_data(comm, keys=keys, **kwargs)

        return get_data_after_its_work

    with wrapped_handler(worker, "get_data", after_its_work):
        yield
