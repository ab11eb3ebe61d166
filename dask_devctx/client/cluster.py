"""A cluster on this machine whose workers drive its GPUs: one line, as ``LocalCluster`` is."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from distributed.core import Status

from dask_devctx.config import options
from dask_devctx.config.options import LOOK_AHEAD
from dask_devctx.cuda.device import Device, named_devices
from dask_devctx.cuda.export import can_export
from dask_devctx.dask_internals.cluster import WatchedCluster
from dask_devctx.dask_internals.scheduler import add_plugin, add_worker_plugin
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.routing import DeviceRouting

# What who comes from dask-cuda writes, and dask's servers would refuse in a worker's log.
_DASK_CUDAS = frozenset(
    {"CUDA_VISIBLE_DEVICES", "device_memory_limit", "jit_unspill", "rmm_async"}
    | {"rmm_managed_memory", "rmm_maximum_pool_size", "rmm_pool_size", "enable_cudf_spill"}
)


class LocalDeviceCluster(WatchedCluster):
    """A ``LocalCluster`` with :class:`~dask_devctx.DevicePlugin` and numbers that suit GPUs.

    Parameters
    ----------
    n_workers
        How many worker processes. Several share the devices out evenly, each has its own. By
        default one for each device where processes can show each other their devices' memory, and
        else one for all. 1 is one for all: for tasks that use several devices, and for large data
        in host memory that all of them read.
    devices
        The devices to use; all that this process sees by default.
    devices_per_worker
        How many each worker has for itself. Workers that are added later take what is free.
    tasks_per_device
        How many tasks run on a device at a time.
    threads_per_worker
        How many tasks dask lets a worker have at a time, and threads of dask's own for those
        without a device. By default 8 for each that its devices run at a time, so that a queue for
        one device does not keep another waiting; fewer, and fewer results are held at a time.
    plugin
        The plugin itself, instead of ``devices``, ``devices_per_worker`` and ``tasks_per_device``.
    **kwargs
        What ``LocalCluster`` takes.

    Raises
    ------
    DeviceNotFoundError
        There is no device of ``devices``.
    DevicesInUseError
        Workers outside this cluster have taken devices that it needs.
    DriverUnavailableError
        The machine has no GPU that can be found and none is simulated.
    TypeError
        ``plugin`` is given together with what it replaces, or an argument that only it takes.
    ValueError
        There are fewer devices than the workers need; on scaling up, too.

    Examples
    --------
    >>> from distributed import Client
    >>> from dask_devctx import Device
    >>> with LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster:
    ...     with Client(cluster) as client:
    ...         print(client.submit(lambda: Device.current().device_id).result())
    0
    """

    def __init__(
        self,
        n_workers: int | None = None,
        *,
        devices: Sequence[object] | None = None,
        devices_per_worker: int | None = None,
        tasks_per_device: int | None = None,
        threads_per_worker: int | None = None,
        plugin: DevicePlugin | None = None,
        **kwargs: Any,
    ) -> None:
        theirs = sorted(kwargs.keys() & _DASK_CUDAS)
        if theirs:
            raise TypeError(
                f"{', '.join(theirs)}: of LocalCUDACluster. Its devices are devices=[...] here; "
                "what stands in for the others is in docs/from-dask-cuda.md"
            )
        for_plugin = sorted(kwargs.keys() & inspect.signature(DevicePlugin).parameters.keys())
        if for_plugin:
            example = ", ".join(f"{name}={kwargs[name]!r}" for name in for_plugin)
            raise TypeError(f"{', '.join(for_plugin)}: give plugin=DevicePlugin({example})")
        self._made_plugin = plugin is None
        if plugin is None:
            named = options.devices(devices)
            used = named_devices(named)
            count = options.count("devices-per-worker", devices_per_worker)
            if n_workers is None:
                n_workers = _n_workers(used, count, kwargs)
            if count is None and n_workers > 1:
                count = _even_share(len(used), n_workers)
            plugin = DevicePlugin(
                # by UUID: a worker may see them in another order
                devices=None if named is None else [device.uuid for device in used],
                devices_per_worker=count,
                tasks_per_device=tasks_per_device,
            )
        elif (devices, devices_per_worker, tasks_per_device) != (None, None, None):
            raise TypeError("give either a plugin, or what it is made of")
        else:
            used = named_devices(plugin.devices)
            if n_workers is None:
                n_workers = _n_workers(used, plugin.devices_per_worker, kwargs)
            if plugin.devices_per_worker is None and n_workers > 1:
                plugin = copy.copy(plugin)
                plugin.devices_per_worker = _even_share(len(used), n_workers)
        self._plugin = plugin
        self._routing = DeviceRouting()
        self._n_devices = len(used)
        self._check_enough(n_workers)
        if threads_per_worker is None:
            running = (plugin.devices_per_worker or len(used)) * plugin.tasks_per_device
            threads_per_worker = LOOK_AHEAD * max(running, 1)
        super().__init__(n_workers=n_workers, threads_per_worker=threads_per_worker, **kwargs)

    def scale(self, n: int = 0, memory: Any = None, cores: Any = None) -> None:
        """Scale to ``n`` workers, as ``LocalCluster`` does."""
        self._check_enough(n)
        super().scale(n, memory=memory, cores=cores)

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Scale by the load, as ``LocalCluster`` does; to as many workers as there is room for.

        Raises
        ------
        ValueError
            ``maximum`` is more than that.
        """
        if kwargs.get("maximum", math.inf) < math.inf:
            self._check_enough(kwargs["maximum"])
        if not {"maximum", "maximum_cores"} & kwargs.keys():
            per_worker = self._plugin.devices_per_worker or self._n_devices
            kwargs["maximum"] = self._n_devices // max(per_worker, 1)
        return super().adapt(*args, **kwargs)

    def _check_enough(self, n_workers: int) -> None:
        per_worker = self._plugin.devices_per_worker
        if per_worker is None:
            if n_workers > 1:
                warnings.warn(
                    f"each of the {n_workers} workers will use all {self._n_devices} devices. For "
                    "a share of its own for each, give LocalDeviceCluster devices_per_worker",
                    stacklevel=3,
                )
        elif n_workers * per_worker > self._n_devices:
            raise ValueError(
                f"{n_workers} workers with {per_worker} devices each need {n_workers * per_worker} "
                f"devices, and there are {self._n_devices}. Start fewer workers, or lower "
                "devices_per_worker"
            )

    # -- as it is told

    async def _scheduler_runs(self) -> None:
        await add_plugin(self.scheduler, self._routing)
        await add_worker_plugin(self.scheduler, self._plugin)

    def _has_closed(self) -> None:
        if self._made_plugin:
            self._plugin.annotations_kept.close()

    def _worker_left(self) -> None:
        """Let scaling start others in the place of workers that could not use their devices."""
        there = {worker.name for worker in self.scheduler.workers.values()}
        for name in self._routing.refused.keys() - there:
            self._forget(name)

    @contextmanager
    def _scaling(self) -> Iterator[None]:
        refused = self._routing.refused  # workers that could not use their devices, and left
        earlier = set(refused)
        yield
        for name in earlier:
            refused.pop(name, None)
        if self.status in (Status.created, Status.starting, Status.running):
            for error in refused.values():
                raise error


def _n_workers(used: Sequence[Device], count: int | None, kwargs: Mapping[str, Any]) -> int:
    """Return how many workers there are where nobody said it."""
    if kwargs.get("processes") is False or len(used) < 2:
        return 1
    if count is not None:
        return max(len(used) // count, 1)
    by_ipc = options.choice("ipc", None, ("auto", True, False)) is not False
    return len(used) if by_ipc and can_export(used) else 1


def _even_share(n_devices: int, n_workers: int) -> int:
    share, left_over = divmod(n_devices, n_workers)
    if share and left_over:
        warnings.warn(
            f"{n_workers} workers have {share} of the {n_devices} devices each: {left_over} of "
            "them will be idle",
            stacklevel=3,
        )
    return max(share, 1)
