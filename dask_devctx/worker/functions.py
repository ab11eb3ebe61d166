"""The functions of ``client.run``: they may break a device, as tasks may."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from distributed import Worker
from distributed.core import error_message

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import wrapped_handler
from dask_devctx.worker.failures.monitor import Monitor

_ONCE: Final = "functions of client.run run once"
_numbers = itertools.count(1)


@contextmanager
def monitoring_functions(
    worker: Worker, monitor: Monitor, devices: Sequence[Device]
) -> Iterator[None]:
    """While it is open, a function of ``client.run`` that breaks a device gets its error.

    Parameters
    ----------
    worker
        The worker.
    monitor
        Monitors its devices.
    devices
        The devices.

    Notes
    -----
    A function may use any device. So it is a suspect on each device that was used already. It is
    neither run again nor waited for.
    """

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        async def run_monitored(comm: Any, *args: Any, **kwargs: Any) -> Any:
            key = f"a function of client.run ({next(_numbers)})"
            used = [device for device in devices if device._handle]
            monitor.began_aside(key, used, _ONCE)
            try:
                answer = await run(comm, *args, **kwargs)
            finally:
                error = monitor.ended_aside(key, used)
            return answer if error is None else error_message(error)

        return run_monitored

    with ExitStack() as steps:
        for op in ("run", "run_coroutine"):
            steps.enter_context(wrapped_handler(worker, op, wrap))
        yield
