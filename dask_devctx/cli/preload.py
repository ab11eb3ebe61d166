"""``--preload dask_devctx``, for workers and for the scheduler."""

from __future__ import annotations

from distributed import Scheduler, Worker, WorkerPlugin

from dask_devctx.dask_internals.worker import set_up_at_start
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.routing import DeviceRouting
from dask_devctx.worker.leases.lease import NOT_STARTED


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
