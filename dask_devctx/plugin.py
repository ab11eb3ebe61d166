"""The worker plugin: its options, and the hooks that dask calls."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

from distributed import Worker, WorkerPlugin

from dask_devctx import config
from dask_devctx.config.options import (
    OPTION_NAMES,
    Options,
    documents_options,
    refuse_unknown,
    remembered_tasks,
    takes_only,
)
from dask_devctx.cuda.device import Device
from dask_devctx.graph.keep import keep_annotations
from dask_devctx.worker import registration, serialization
from dask_devctx.worker.extension import DeviceExtension
from dask_devctx.worker.interpreter import switch_interval


@documents_options
class DevicePlugin(WorkerPlugin):  # type: ignore[misc]
    """Run each task of a worker on the GPU that it was assigned.

    Parameters
    ----------
    {options}

    Raises
    ------
    TypeError
        ``devices`` is not a sequence, or there is no option of a name that is given.
    UnsupportedDaskError
        The installed dask or distributed lacks a name that this package uses.
    ValueError
        An option, or the configuration that stands in for it, is out of range.

    Attributes
    ----------
    options
        All options, as :class:`~dask_devctx.config.options.Options`.

    Notes
    -----
    What is not given is taken from dask's configuration (``devctx.*``) where the plugin is made.
    It works on a cluster that is running and on workers that join later, and is wholly undone by
    ``client.unregister_worker_plugin("devctx")``, while tasks run. A worker that joins and finds
    too few devices free for ``devices_per_worker`` leaves again.

    Making one also makes ``device`` annotations of this process' arrays, bags and delayed values
    survive dask's optimization: see :func:`~dask_devctx.graph.keep.keep_annotations`.

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
    # What it has set up on its worker.
    extension: DeviceExtension | None = None

    @takes_only(Options)
    def __init__(self, **given: Any) -> None:
        refuse_unknown(given, OPTION_NAMES, "DevicePlugin")
        self.annotations_kept = keep_annotations()
        serialization.register()  # in this process too, for the values that it scatters
        config.warn_of_unknown_keys()
        self.options = Options(**given)
        remembered_tasks()  # this and the next are read by each worker, and refused here
        switch_interval()

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that its worker uses, where it is set up on one."""
        return () if self.extension is None else self.extension.placement.devices

    def report(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return the worker's tasks and their devices, as plain data; None where it is not set up.

        To be called on the worker's event loop.
        """
        return None if self.extension is None else self.extension.report()

    # -- dask's hooks

    async def setup(self, worker: Worker) -> None:
        """Take the worker's tasks in hand; those that run already are left as they are.

        Raises
        ------
        DevctxError, TypeError
            The worker does not have the devices. It goes on without, unless they are others':
            tasks that ask for a device fail on it with the same error, and all others run as they
            did. dask keeps the plugin; a note on the error says how to get out.
        UnsupportedDaskError
            The worker's dask or distributed lacks a name that this package uses.
        ValueError
            The worker has another plugin of this kind, by another name.

        Notes
        -----
        Where it raises, but for the first case, the worker is as it was.
        """
        for name, other in worker.plugins.items():
            if isinstance(other, DevicePlugin) and other is not self:
                raise ValueError(
                    f"this worker has a DevicePlugin already, by the name {name!r}, and one drives "
                    "all its devices. Register it without a name of its own, and it takes the "
                    "other's place, or take that away first: "
                    f"client.unregister_worker_plugin({name!r})"
                )
        if self.extension is not None:  # it is the plugin of another worker of this process, too
            own = copy.copy(self)
            own.extension = None
            worker.plugins.update({n: own for n, p in worker.plugins.items() if p is self})
            await own.setup(worker)
            return
        self.extension = DeviceExtension(worker, self.options)
        failure = self.extension.failure
        if failure is None:
            await registration.announce(worker, self.extension.placement.devices)
        else:
            await registration.refuse(worker, failure)
            raise failure  # dask tells the client, and keeps the plugin

    async def teardown(self, worker: Worker) -> None:
        """Leave the worker as it was before :meth:`setup`; running tasks run on to their end."""
        # Nothing is awaited in here: dask calls no hook of a plugin that it is about to replace,
        # and a task that begins in between would run on no device, or on another plugin's.
        if self.extension is not None:
            self.extension.close()
            self.extension = None
            registration.withdraw(worker)
        self.annotations_kept.close()  # where it was made in this process

    def transition(self, key: Hashable, start: str, finish: str, **kwargs: Any) -> None:
        """Follow each task of the worker from state to state."""
        if self.extension is not None:
            self.extension.transition(key, start, finish)
