"""``LocalDeviceCluster``: the number of workers that it starts, and the devices of each."""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import Any

import dask
from dask.utils import get_named_args, parse_timedelta
from distributed import Nanny, Worker
from distributed.core import Status

from dask_devctx.client.layout import lay_out
from dask_devctx.config.checks import settings, whole_number
from dask_devctx.config.options import (
    OPTION_NAMES,
    RMM_NAMES,
    fold_rmm,
    refuse_unknown,
    require_packages,
    require_ucx,
    takes_options,
)
from dask_devctx.cuda.device import devices
from dask_devctx.dask_internals import scheduler as internals
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.routing import DeviceRouting


@takes_options
class LocalDeviceCluster(internals.WatchedCluster):
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
        The number of tasks that dask gives a worker at a time; of those without a device, at most
        ``cpu_threads`` run. By default 8 for each task that the worker's devices run at a time, so
        that a queue for one device keeps no other waiting. With fewer, it holds fewer results.
    **kwargs
        Further arguments of ``LocalCluster`` and of its workers, and dask-cuda's ``rmm_…``: see
        "Move from dask-cuda" in the documentation.

    Raises
    ------
    DevctxError
        A worker cannot set the plugin up, such as where a module of ``pre_import`` fails. Scaling
        up raises this too.
    DeviceNotFoundError
        A device of ``devices`` does not exist.
    DevicesInUseError
        Workers outside this cluster hold devices that it needs.
    DriverUnavailableError
        No GPU was found, and no device is simulated.
    ImportError
        A package that an option needs is not installed.
    RuntimeError
        A worker cannot start.
    TypeError
        An argument is unknown.
    ValueError
        The workers need more devices than there are. Scaling up raises this too. Or an argument is
        out of range.
    VisibleDevicesError
        ``CUDA_VISIBLE_DEVICES`` hides all devices.

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
        threads_per_worker: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(n_workers, Integral | None):
            raise TypeError(
                f"n_workers is a number of workers, got {n_workers!r}. For devices 0 "
                "and 1, write devices=[0, 1]"
            )
        n_workers = n_workers if n_workers is None else int(n_workers)  # NumPy's may overflow
        if threads_per_worker is not None:
            threads_per_worker = whole_number(1)("threads_per_worker", threads_per_worker)
        kwargs = fold_rmm(_known(kwargs, type(self)))
        require_ucx(kwargs.get("protocol"))
        plugin = DevicePlugin(**{n: kwargs.pop(n) for n in OPTION_NAMES if n in kwargs})
        require_packages(plugin.options)
        processes = kwargs.get("processes") is not False
        if processes and getattr(multiprocessing.current_process(), "_inheriting", False):
            sys.exit('Workers import the script: start the cluster under if __name__ == "__main__"')
        self._layout = layout = lay_out(plugin.options, n_workers, processes=processes)
        plugin.options = replace(plugin.options, **layout.options)
        plugin.is_required = True  # no worker of this cluster runs tasks without devices
        self._plugin = plugin
        self._routing = DeviceRouting()
        if kwargs.get("memory_limit", "auto") == "auto":
            kwargs["memory_limit"] = layout.memory_limit
        if processes and kwargs.get("worker_class") in (None, Nanny):
            kwargs["config"] = (kwargs.get("config") or {}) | settings(layout.options)
        nthreads = threads_per_worker or layout.nthreads
        self._ahead = internals.LOOK_AHEAD * nthreads / layout.nthreads
        super().__init__(n_workers=layout.n_workers, threads_per_worker=nthreads, **kwargs)

    def __repr__(self) -> str:
        used = frozenset().union(*self._routing.devices.values())
        names = ", ".join(str(device) for device in devices() if device.uuid in used) or "none"
        return f"{super().__repr__()[:-1]}, devices={names})"

    def scale(self, n: int = 0, memory: Any = None, cores: Any = None) -> Any:
        """Scale to ``n`` workers, as ``LocalCluster`` does."""
        n = self._workers_for(n, memory, cores)
        self._layout.check(n)
        return super().scale(n)

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Scale by the load, as ``LocalCluster`` does, to at most as many workers as have devices.

        Raises
        ------
        ValueError
            ``minimum`` or ``maximum`` workers need more devices than there are.
        """
        n, memory, cores = (kwargs.get(f"minimum{kind}") for kind in ("", "_memory", "_cores"))
        self._layout.check(self._workers_for(n or 0, memory, cores))
        maximum, n_devices = kwargs.get("maximum"), len(self._layout.devices)
        if maximum in (None, math.inf):
            kwargs["maximum"] = n_devices // (self._layout.share or n_devices)
        else:
            self._layout.check(maximum)
        # dask divides the load by a worker's threads, and its devices run fewer tasks at a time.
        usual = dask.config.get("distributed.adaptive.target-duration")
        wanted_s = parse_timedelta(kwargs.get("target_duration") or usual)
        kwargs["target_duration"] = wanted_s / self._ahead
        return super().adapt(*args, **kwargs)

    @contextmanager
    def _scaling(self) -> Iterator[None]:
        refused = self._routing.refused  # workers that could not use their devices, and left
        refused.clear()
        yield
        if refused and self.status in (Status.created, Status.starting, Status.running):
            raise next(iter(refused.values()))


def _known(given: dict[str, Any], owner: type) -> dict[str, Any]:
    """Return the arguments of a cluster; refuse those that neither it nor its workers have."""
    worker_class = given.get("worker_class")
    if worker_class is not None and not callable(worker_class):
        raise TypeError(
            f"worker_class is a class of nannies or of workers, got {worker_class!r}. Leave it out "
            "for dask's own: the workers use their devices without a class such as CUDAWorker"
        )
    bases = {*owner.__mro__, *Nanny.__mro__, *Worker.__mro__}
    bases.update(worker_class.__mro__ if isinstance(worker_class, type) else ())
    named = {name for cls in bases for name in get_named_args(cls.__init__)}
    refuse_unknown(given, named | {*OPTION_NAMES, *RMM_NAMES}, owner.__name__)
    return given
