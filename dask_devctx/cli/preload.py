"""``--preload dask_devctx``, for workers and for the scheduler."""

from __future__ import annotations

from contextlib import suppress

import click
import dask
from distributed import Scheduler, Worker, WorkerPlugin

from dask_devctx.config.options import Options
from dask_devctx.cuda.device import named_devices
from dask_devctx.dask_internals.worker import set_up_at_start
from dask_devctx.errors import DevctxError
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.routing import DeviceRouting
from dask_devctx.worker.leases.registration import NOT_STARTED


async def dask_setup(server: object) -> None:
    """Give a worker the plugin, as the configuration describes it, or a scheduler the routing."""
    if isinstance(server, Scheduler):
        await server.register_scheduler_plugin(
            DeviceRouting(), name=DeviceRouting.name, idempotent=True
        )
    elif isinstance(server, Worker):
        plugin: WorkerPlugin
        # dask logs the exception of a preload and continues: the plugin raises it at the start.
        try:
            plugin = DevicePlugin()
        except Exception as error:
            plugin = _Failing(error)
        set_up_at_start(server, plugin)
    else:
        raise TypeError(
            "dask_devctx is preloaded by workers and schedulers (distributed.worker.preload, "
            f"distributed.scheduler.preload), not by {type(server).__name__}"
        )


class _Failing(WorkerPlugin):  # type: ignore[misc]
    """Stands in for a plugin that could not be made."""

    name = DevicePlugin.name

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def setup(self, worker: Worker) -> None:
        self._error.add_note(NOT_STARTED)
        raise self._error


def _divide() -> None:
    """Let ``dask worker --preload dask_devctx`` divide the devices by its ``--nworkers``."""
    context = click.get_current_context(silent=True)
    command = getattr(context and context.command.callback, "__module__", "")
    # A process that is forked from this one later must find the driver untouched.
    forks = dask.config.get("distributed.worker.multiprocessing-method", "spawn") != "spawn"
    workers = "" if context is None else str(context.params.get("n_workers"))
    if command != "distributed.cli.dask_worker" or forks or not workers.isdecimal():
        return
    with suppress(DevctxError, TypeError, ValueError):  # the worker's start names what is wrong
        options = Options()
        if options.devices_per_worker is None and not options.shared:
            each = len(named_devices(options.devices)) // max(int(workers), 1)
            dask.config.set({"devctx.devices-per-worker": max(each, 1)})


_divide()
