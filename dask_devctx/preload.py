"""``--preload dask_devctx``, for workers and for the scheduler."""

from __future__ import annotations

from distributed import Scheduler, Worker, WorkerPlugin

from dask_devctx.plugin import DevicePlugin
from dask_devctx.routing import DeviceRouting


async def dask_setup(server: object) -> None:
    """Give a worker the plugin, as the configuration describes it, or a scheduler the routing.

    Parameters
    ----------
    server
        The worker or scheduler that preloads this package, while it starts.

    Raises
    ------
    TypeError
        It is something else, such as a nanny.

    Notes
    -----
    A worker that cannot use its devices does not start. dask logs what a preload raises and goes
    on, so the worker is handed the error to raise by itself.
    """
    if isinstance(server, Scheduler):
        await server.register_scheduler_plugin(
            DeviceRouting(), name=DeviceRouting.name, idempotent=True
        )
    elif isinstance(server, Worker):
        plugin: WorkerPlugin
        try:
            plugin = DevicePlugin()
        except Exception as error:
            plugin = _Failing(error)
        # What dask sets up right after the preloads; what fails there, fails the worker's start.
        server._pending_plugins = (*server._pending_plugins, plugin)
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

    def setup(self, worker: Worker) -> None:
        raise self._error
