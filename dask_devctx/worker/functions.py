"""The functions of ``client.run``: their device, and the devices that they may break."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from distributed import Worker
from distributed.core import error_message

from dask_devctx.config.options import Options, rmm_options
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import on_device
from dask_devctx.dask_internals.worker import wrapped_handler
from dask_devctx.errors import DeviceFailedError
from dask_devctx.worker.failures.guard import Guard
from dask_devctx.worker.failures.monitor import Monitor

_ONCE: Final = "functions of client.run run once"
_numbers = itertools.count(1)


@contextmanager
def functions_of_clients(
    worker: Worker, monitor: Monitor, devices: Sequence[Device], options: Options
) -> Iterator[None]:
    """While it is open, a function of ``client.run`` that breaks a device gets its error.

    On a worker of one device whose memory comes from RMM, the function runs on this device. So
    RMM's own functions, which ask for the current resource, get the worker's.

    A function may use any device. So it is a suspect on each device that was used already. It is
    neither run again nor waited for.
    """

    def wrap(run: Callable[..., Any], here: Device | None = None) -> Callable[..., Any]:
        if here is not None:
            run = on_device(here)(run)

        async def run_monitored(comm: Any, *args: Any, **kwargs: Any) -> Any:
            used = tuple(device for device in devices if device._handle)
            if not used:
                return await run(comm, *args, **kwargs)
            key = f"a function of client.run ({next(_numbers)})"
            call = Guard(monitor, key, used, is_coro=True, not_again=_ONCE)
            try:
                return await call.run_coroutine(partial(run, comm, *args, **kwargs))
            except DeviceFailedError as error:
                return error_message(error)

        return run_monitored

    only = devices[0] if len(devices) == 1 and rmm_options(options) else None
    with (
        wrapped_handler(worker, "run", partial(wrap, here=only)),
        wrapped_handler(worker, "run_coroutine", wrap),
    ):
        yield
