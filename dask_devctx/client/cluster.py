"""``LocalDeviceCluster``: the number of workers that it starts, and the devices of each."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import dask
from distributed.core import Status

from dask_devctx import driver
from dask_devctx.client.arguments import SETTINGS_OF_DASK_CUDA, has_nannies, without_dask_cudas
from dask_devctx.client.layout import (
    default_n_workers,
    even_share,
    held_by_others,
    look_ahead,
    warn_of_idle,
    warn_of_limit,
    warn_of_threads,
)
from dask_devctx.client.main_module import refuse_unguarded_main
from dask_devctx.config.checks import key_of
from dask_devctx.config.host_memory import fair_memory
from dask_devctx.config.options import OPTION_NAMES, Options
from dask_devctx.config.packages import require_packages
from dask_devctx.config.signatures import documents_options, takes_options
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device, devices, named_devices
from dask_devctx.cuda.html import html_table
from dask_devctx.dask_internals.cluster import WatchedCluster
from dask_devctx.dask_internals.scheduler import add_plugin, add_worker_plugin
from dask_devctx.errors import DevicesInUseError, VisibleDevicesError
from dask_devctx.errors.base import counted
from dask_devctx.errors.leases import held_text
from dask_devctx.graph.calls import users_level
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.routing import DeviceRouting

logger = logging.getLogger(__name__)


@documents_options
class LocalDeviceCluster(WatchedCluster):
    """A ``LocalCluster`` with :class:`~dask_devctx.DevicePlugin` and defaults that suit GPUs.

    Parameters
    ----------
    n_workers
        The number of worker processes. The free devices, those that no other cluster of this user
        holds, are divided evenly among them. By default, there is one worker for each device if
        processes can open each other's device memory, and one worker for all devices if they
        cannot. 1 suits tasks that use several devices, and large data in host memory that all tasks
        read.
    {options}
    threads_per_worker
        The number of tasks that dask gives a worker at a time. It is also the number of dask's own
        threads, which run the tasks without a device. By default, it is 8 for each task that the
        worker's devices run at a time, so that a queue for one device does not keep another device
        waiting. With a smaller number, the worker holds fewer results at a time.
    plugin
        The plugin itself, instead of its options.
    **kwargs
        Further arguments of ``LocalCluster`` and of its workers, and those of dask-cuda's
        ``LocalCUDACluster``: see "Move from dask-cuda" in the documentation.

    Raises
    ------
    DeviceNotFoundError
        A device of ``devices`` does not exist.
    DevicesInUseError
        Workers outside this cluster hold devices that it needs.
    DriverUnavailableError
        No GPU was found, and no device is simulated.
    MissingPackageError
        A package that an option needs is not installed.
    RuntimeError
        A script starts the cluster outside of ``if __name__ == "__main__":``.
    TypeError
        An argument is unknown, or ``plugin`` is given together with its options.
    ValueError
        The workers need more devices than there are. Scaling up raises this too.
    VisibleDevicesError
        ``CUDA_VISIBLE_DEVICES`` hides all devices.
    WorkerSetupError
        A worker cannot set the plugin up, such as where a module of ``pre_import`` fails. Scaling
        up raises this too.

    Examples
    --------
    >>> from distributed import Client
    >>> from dask_devctx import Device
    >>> with LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster:
    ...     with Client(cluster) as client:
    ...         print(client.submit(lambda: Device.current().device_id).result())
    0
    """

    _share_said = ""
    # The devices that were in use when it started, and their holders, as a text.
    _left_to_others = ""
    # Whether it has only those that were free then.
    _is_rest = False

    @takes_options
    def __init__(
        self,
        n_workers: int | None = None,
        *,
        threads_per_worker: int | None = None,
        plugin: DevicePlugin | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(n_workers, int | None):
            raise TypeError(
                f"n_workers is a number of workers, got {n_workers!r}. The devices are "
                "devices=[0, 1], or CUDA_VISIBLE_DEVICES='0,1'"
            )
        if threads_per_worker is not None and threads_per_worker < 1:
            raise ValueError(f"threads_per_worker must be 1 or more, got {threads_per_worker}")
        kwargs = without_dask_cudas({"n_workers": n_workers, **kwargs}, type(self))
        n_workers = kwargs.pop("n_workers")
        given = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
        settings = {
            f"devctx.{key_of(n)}": kwargs.pop(n) for n in SETTINGS_OF_DASK_CUDA & kwargs.keys()
        }
        own: dict[str, Any] = {}
        self._made_plugin = plugin is None
        if plugin is None:
            with dask.config.set({key: v for key, v in settings.items() if v is not None}):
                plugin = DevicePlugin(**given)
            used = named_devices(plugin.options.devices)
            if plugin.options.devices is not None:  # a worker may see them in another order
                own["devices"] = [device.uuid for device in used]
                _warn_of_twice(plugin.options.devices, used)
        elif both := [n for n, value in {**given, **settings}.items() if value is not None]:
            raise TypeError(f"give either a plugin or its options, got both: {', '.join(both)}")
        else:
            used = named_devices(plugin.options.devices)
        if not used:
            raise _all_hidden()
        require_packages(plugin.options)
        warn_of_limit(plugin.options.device_memory_limit, used)
        held = held_by_others(used, plugin.options, n_workers, in_process=not has_nannies(kwargs))
        free = tuple(device for device in used if device not in held)
        if held:
            self._left_to_others = held_text({str(d): who for d, who in held.items()})
            logger.warning(
                "This cluster uses devices that are free, %s: %s",
                ", ".join(map(str, free)) or "none now",
                self._left_to_others,
            )
        if n_workers is None:
            if held:  # later, too, it uses no others
                own["devices"] = [device.uuid for device in free]
                used, self._is_rest = free, True
            processes = kwargs.get("processes") is not False
            n_workers = default_n_workers(free, plugin.options, processes=processes)
            if not plugin.options.shared:
                warn_of_idle(n_workers, plugin.options.devices_per_worker, len(free))
        options = plugin.options
        if options.devices_per_worker is None and n_workers > 1 and not options.shared:
            own["devices_per_worker"] = even_share(len(free), n_workers)
            self._share_said = (
                f": the {len(free)} devices were divided among n_workers={n_workers}. For more "
                "workers later, pass devices_per_worker to LocalDeviceCluster"
            )
        plugin = copy.copy(plugin)
        plugin.options = replace(plugin.options, **own)
        plugin.is_required = True  # no worker of this cluster runs tasks without devices
        self._plugin = plugin
        self._routing = DeviceRouting()
        self._n_devices = len(used)
        # Workers of one process use the same devices, unless each takes a number of them.
        self._shared = plugin.options.shared or kwargs.get("processes") is False
        self._check_enough(n_workers)
        per_worker = plugin.options.devices_per_worker or len(free)
        if threads_per_worker is None:
            threads_per_worker = look_ahead(per_worker, plugin.options)
        else:
            warn_of_threads(threads_per_worker, per_worker, plugin.options)
        if "memory_limit" not in kwargs:
            each = None if plugin.options.shared else plugin.options.devices_per_worker
            together = 1 if each else max(n_workers, 1)
            kwargs["memory_limit"] = fair_memory(each or self._n_devices) // together
        if has_nannies(kwargs):  # a plugin that is registered later leaves the devices as they are
            kwargs["config"] = _configuration(plugin.options, kwargs.get("config") or {})
            refuse_unguarded_main()
        try:
            super().__init__(n_workers=n_workers, threads_per_worker=threads_per_worker, **kwargs)
        except DevicesInUseError as error:  # others took devices meanwhile
            raise error.with_traceback(None) from None  # dask's own frames tell a user nothing

    def __repr__(self) -> str:
        names = ", ".join(self._used_now()) or "none"
        left = f"; left to others at its start: {self._left_to_others}"
        return f"{super().__repr__()[:-1]}, devices={names}{left if self._left_to_others else ''})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        found: str = super()._repr_html_(cluster_status=cluster_status)
        rows = self._used_now()
        if self._left_to_others:
            rows["left to others at its start"] = self._left_to_others
        return found + html_table("Devices", rows)

    def _used_now(self) -> dict[str, str]:
        """Return the devices that workers have, as names and UUIDs, in the order of their names."""
        plugins = {} if self.scheduler is None else self.scheduler.plugins
        routing = plugins.get(DeviceRouting.name, self._routing)
        used = frozenset().union(*routing.devices.values())
        return {str(d): d.uuid for d in devices() if d.uuid in used}

    def scale(self, n: int = 0, memory: Any = None, cores: Any = None) -> None:
        """Scale to ``n`` workers, as ``LocalCluster`` does."""
        self._check_enough(n)
        super().scale(n, memory=memory, cores=cores)

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Scale by the load, as ``LocalCluster`` does, to at most as many workers as have devices.

        Raises
        ------
        ValueError
            ``maximum`` workers need more devices than there are.
        """
        if kwargs.get("maximum", math.inf) < math.inf:
            self._check_enough(kwargs["maximum"])
        if not {"maximum", "maximum_cores"} & kwargs.keys():
            per_worker = self._plugin.options.devices_per_worker or self._n_devices
            kwargs["maximum"] = self._n_devices // max(per_worker, 1)
        return super().adapt(*args, **kwargs)

    def _check_enough(self, n_workers: int) -> None:
        options = self._plugin.options
        if options.shared:
            return
        per_worker = options.devices_per_worker
        if per_worker is None and self._shared:
            if n_workers > 1:
                warnings.warn(
                    f"each of the {n_workers} workers will use all {self._n_devices} devices. To "
                    "give each worker its own devices, pass devices_per_worker to "
                    "LocalDeviceCluster",
                    stacklevel=3,
                )
            return
        per_worker = per_worker or 1  # at least
        if n_workers * per_worker > self._n_devices:
            have = "this machine has" if options.devices is None else "devices= names"
            if self._is_rest:
                have = "when this cluster started, it got the free devices:"
            remedy = f"Start at most {counted(self._n_devices, 'worker')}"
            if per_worker > 1:
                remedy = f"Start fewer workers, or lower devices_per_worker{self._share_said}"
            raise ValueError(
                f"{counted(n_workers, 'worker')} with {counted(per_worker, 'device')} each would "
                f"need {n_workers * per_worker}, and {have} {self._n_devices}. {remedy}"
            )

    # -- the hooks of WatchedCluster

    async def _scheduler_runs(self) -> None:
        await add_plugin(self.scheduler, self._routing)
        await add_worker_plugin(self.scheduler, self._plugin)

    def _has_closed(self) -> None:
        if self._made_plugin:
            self._plugin.annotations_kept.close()

    def _worker_left(self) -> None:
        """Let scaling replace the workers that could not use their devices."""
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


def _all_hidden() -> VisibleDevicesError:
    found = discovery.inventory(driver.backend())
    why = ". ".join(["it hides all devices of this machine", *found.problems])
    return VisibleDevicesError(found.visible_devices, f"{why}. Unset it, or name devices in it")


def _warn_of_twice(named: Sequence[object], used: Sequence[Device]) -> None:
    if len(used) < len(named):
        warnings.warn(
            f"devices={list(named)!r} names a device twice, and the cluster uses each once: "
            f"{', '.join(map(str, used))}. For more tasks at a time on a device: tasks_per_device",
            stacklevel=users_level(),
        )


def _configuration(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration for the workers' processes that has their devices, too."""
    devices = {"devices": options.devices, "devices-per-worker": options.devices_per_worker}
    mine = {name: value for name, value in devices.items() if value is not None}
    section = dask.config.merge(dask.config.get("devctx", {}), given.get("devctx", {}), mine)
    return {**given, "devctx": section}
