"""A cluster on this machine whose workers drive its GPUs: one line, as ``LocalCluster`` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask.system import CPU_COUNT
from distributed import LocalCluster
from distributed.core import Status
from distributed.deploy.spec import SpecCluster
from distributed.protocol.pickle import dumps, loads

from dask_devctx.device import Device
from dask_devctx.device import devices as all_devices
from dask_devctx.plugin import DevicePlugin

# How many tasks a worker is shown for each that can run. A device's tasks run on the device's own
# threads, so a worker's `nthreads` is how far dask lets it look ahead; it costs nothing.
_LOOK_AHEAD = 16


class LocalDeviceCluster(LocalCluster):  # type: ignore[misc]
    """A ``LocalCluster`` with :class:`~dask_devctx.DevicePlugin` and numbers that suit GPUs.

    Parameters
    ----------
    n_workers
        How many worker processes.
    devices
        The devices that each worker uses; all that it sees by default.
    tasks_per_device
        How many tasks run on a device at a time.
    threads_per_worker
        How many tasks dask lets a worker have at a time; many more than can run by default, so
        that a queue for one device does not keep another waiting.
    plugin
        The plugin itself, instead of ``devices`` and ``tasks_per_device``.
    **kwargs
        What ``LocalCluster`` takes.

    Raises
    ------
    DeviceNotFoundError
        A worker does not have a device of ``devices``.
    DriverUnavailableError
        The machine has no GPU that can be found and none is simulated.
    TypeError
        ``plugin`` is given together with what it replaces.

    Examples
    --------
    >>> from distributed import Client
    >>> with LocalDeviceCluster(processes=False, dashboard_address=None) as cluster:
    ...     with Client(cluster) as client:
    ...         print(client.submit(lambda: Device.current().device_id).result())
    0
    """

    def __init__(
        self,
        n_workers: int = 1,
        *,
        devices: Sequence[object] | None = None,
        tasks_per_device: int | None = None,
        threads_per_worker: int | None = None,
        plugin: DevicePlugin | None = None,
        **kwargs: Any,
    ) -> None:
        if plugin is None:
            plugin = DevicePlugin(devices=devices, tasks_per_device=tasks_per_device)
        elif devices is not None or tasks_per_device is not None:
            raise TypeError("give either a plugin, or devices and tasks_per_device")
        used = all_devices() if plugin.devices is None else [Device(d) for d in plugin.devices]
        if threads_per_worker is None:
            running = len(used) * plugin.tasks_per_device
            threads_per_worker = max(_LOOK_AHEAD * running, CPU_COUNT // n_workers, 1)
        self._plugin = plugin
        super().__init__(n_workers=n_workers, threads_per_worker=threads_per_worker, **kwargs)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # Some time after a worker was lost, dask closes the nanny if no worker of its name is there
        # at that moment: also where it had come back and was lost again just now. A nanny that runs
        # starts another worker by itself; it is left to do so.
        if op == "remove":
            name = self.scheduler_info["workers"][msg]["name"]
            if getattr(self.workers.get(name), "status", None) == Status.running:
                super(SpecCluster, self)._update_worker_status(op, msg)
                return
        super()._update_worker_status(op, msg)

    async def _start(self) -> None:
        await super()._start()
        responses = await self.scheduler.register_worker_plugin(
            None, dumps(self._plugin), name=self._plugin.name, idempotent=False
        )
        for response in responses.values():
            if response["status"] == "error":
                await self._close()
                error = response["exception"]
                raise loads(error) if isinstance(error, bytes) else error.data
