"""The worker plugin: its options, and the hooks that dask calls."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from distributed import Status, Worker, WorkerPlugin

from dask_devctx import config
from dask_devctx.config.checks import key_of, missing_device_timeout_s
from dask_devctx.config.options import (
    OPTION_NAMES,
    RMM_NAMES,
    Options,
    refuse_unknown,
    remembered_tasks,
    takes_options,
)
from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals import check_worker
from dask_devctx.dask_internals.worker import no_more_heartbeats
from dask_devctx.graph.keep import keep_annotations
from dask_devctx.worker.extension import DeviceExtension
from dask_devctx.worker.leases.lease import DeviceLease
from dask_devctx.worker.leases.locks import held_devices

__all__ = ["DevicePlugin", "held_devices"]


@takes_options
class DevicePlugin(WorkerPlugin):  # type: ignore[misc]
    """Run each task of a worker on the GPU that is assigned to it.

    Parameters
    ----------
    {options}

    Raises
    ------
    TypeError
        ``devices`` is not a sequence, or an option is unknown.
    DevctxError
        The installed dask or distributed lacks a name that this package uses.
    ValueError
        An option, or its configured value, is out of range.

    Attributes
    ----------
    options
        All options, as :class:`~dask_devctx.config.options.Options`. Each is also an attribute of
        the plugin.

    Notes
    -----
    Options that are not given come from dask's configuration (``devctx.*``), in the process that
    makes the plugin. The plugin works on a running cluster and on workers that join later.
    ``client.unregister_worker_plugin("devctx")`` removes it from all workers, also while tasks run.
    A worker that joins leaves again if fewer than ``devices_per_worker`` devices are free.

    The plugin also keeps the ``device`` annotations of this process's arrays, bags and delayed
    values through dask's optimization: see :func:`~dask_devctx.graph.keep.keep_annotations`.

    Examples
    --------
    >>> import dask
    >>> from distributed import Client, LocalCluster
    >>> with LocalCluster(processes=False, dashboard_address=":0") as cluster, Client(cluster) as c:
    ...     _ = c.register_plugin(DevicePlugin())
    ...     with dask.annotate(device=1):
    ...         print(c.submit(lambda: Device.current().device_id).result())
    1
    """

    name = "devctx"
    # Whether a worker that joins leaves again if the plugin cannot be set up there.
    is_required = False
    # Set on a worker, while the plugin is set up there.
    extension: DeviceExtension | None = None
    _lease: DeviceLease | None = None

    def __init__(self, **options: Any) -> None:
        refuse_unknown(options, OPTION_NAMES, type(self).__name__)
        keep_annotations()
        for text in config.unknown_keys():
            warnings.warn(text, stacklevel=2)
        self.options = Options(**options)
        # Each worker reads the first, the scheduler the second; a bad value is refused here.
        remembered_tasks()
        missing_device_timeout_s()

    def __getattr__(self, name: str) -> Any:
        if name in Options.__dataclass_fields__ or name in RMM_NAMES:
            return getattr(self.options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        usual, values = config.defaults["devctx"], {n: getattr(self, n) for n in OPTION_NAMES}
        shown = {n: v for n, v in values.items() if v not in (None, usual.get(key_of(n)))}
        if self.extension is not None:
            shown = {"worker_devices": self.worker_devices, **shown}
        return f"DevicePlugin({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that its worker uses; empty where the plugin is not set up."""
        return () if self.extension is None else self.extension.placement.devices

    def report(self) -> dict[str, Any] | None:
        """Return the worker's tasks and transfers, as plain data; call this on its event loop."""
        if (found := self.extension) is None:
            return None
        return {**found.record.report(), "transfers": found.traffic.rows()}

    # -- dask's hooks

    async def setup(self, worker: Worker) -> None:
        """Run the worker's tasks on its devices from now on; running tasks do not change.

        If this raises, a worker that joins leaves, where others hold its devices or in a
        ``LocalDeviceCluster``. Where the error is about its devices, any other worker continues
        without them, and refuses tasks that name none if it had devices; else it is unchanged.
        """
        for name, other in worker.plugins.items():
            # One without a lease was itself refused here.
            if isinstance(other, DevicePlugin) and other is not self and other._lease is not None:
                raise ValueError(
                    f"this worker has a DevicePlugin already, by the name {name!r}, and one plugin "
                    "drives all its devices. Register the new plugin without a name of its own to "
                    "replace the other, or remove the other first: "
                    f"client.unregister_worker_plugin({name!r})"
                )
        if self._lease is not None:  # another worker of this process uses this object
            own = copy.copy(self)
            own.extension = own._lease = None
            worker.plugins.update({n: own for n, p in worker.plugins.items() if p is self})
            await own.setup(worker)
            return
        check_worker(worker)  # before the scheduler is asked for devices
        name = next((n for n, plugin in worker.plugins.items() if plugin is self), self.name)
        # From now on, an earlier plugin does not withdraw the devices.
        lease = self._lease = DeviceLease(worker, self.options, name)
        failure: Exception | None = None
        try:
            if devices := lease.at_once():
                failure = self._use(worker, devices)
            try:
                devices = await lease.settle()
            except Exception as error:
                devices, failure = (), error
            if self._lease is not lease:  # the plugin was removed meanwhile
                return
            if failure is not None or devices != self.worker_devices:
                failure = self._use(worker, devices, failure)
        except BaseException as error:
            if not (self.is_required and isinstance(error, Exception)):
                lease.release()
                self._lease = None
                raise
            failure = error
        if failure is not None:
            lease.release()
            if not await lease.refuse(failure, leaves=self.is_required):
                raise failure  # dask tells the client, and keeps the plugin
        elif self.extension is not None:
            self.extension.log_devices()
            await lease.announce(self.extension.limits)

    def _use(
        self, worker: Worker, devices: tuple[Device, ...], failure: Exception | None = None
    ) -> Exception | None:
        """Let the worker use devices in place of those that it has; return why it cannot."""
        if self.extension is not None:
            self.extension.close()
            self.extension = None
        had = self._lease is not None and bool(self._lease.before)
        self.extension = DeviceExtension(worker, self.options, devices, failure, had=had)
        return self.extension.failure

    async def teardown(self, worker: Worker) -> None:
        """Restore the worker as it was before :meth:`setup`; running tasks run to their end."""
        # Nothing is awaited here: dask calls no hook of a plugin that it is about to replace. A
        # task that began in between would run on no device, or on a device of another plugin.
        try:
            if self.extension is not None:
                self.extension.close()
        finally:  # a worker that keeps the locks of its devices could never have them again
            if self._lease is not None:
                if self.extension is not None:
                    self._lease.withdraw()
                self._lease.release()
            self.extension = self._lease = None
        if worker.status is Status.closing:
            await no_more_heartbeats(worker)
