"""The worker plugin: what it is told, and what dask calls."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

from distributed import Worker, WorkerPlugin

from dask_devctx import config
from dask_devctx.annotations import Unannotated
from dask_devctx.config import options
from dask_devctx.cuda.device import Device
from dask_devctx.graph.keep import keep_annotations
from dask_devctx.worker import registration, serialization
from dask_devctx.worker.extension import DeviceExtension
from dask_devctx.worker.interpreter import switch_interval
from dask_devctx.worker.policy import Policy, start_soonest


class DevicePlugin(WorkerPlugin):  # type: ignore[misc]
    """Run each task of a worker on the GPU that it was assigned.

    Parameters
    ----------
    devices
        The devices that the worker uses, each anything that :class:`~dask_devctx.Device` accepts;
        all that it sees by default.
    devices_per_worker
        How many of them the worker takes for itself alone: workers of one machine and user that
        are given this share the devices out without overlap. None for all, shared with anybody.
    tasks_per_device
        How many tasks run on a device at a time. Tasks that wait for each other must all have a
        place: see docs/deployment.md.
    unannotated
        ``"assign"`` gives a task without a ``device`` annotation a device; ``"leave"`` leaves it on
        dask's own threads without one.
    move_inputs
        Whether a task's inputs that live on another device are copied to its own before it runs.
    replica_limit
        How much of each device's memory such copies may take, as a fraction.
    policy
        Chooses the device of a task that names none, given one
        :class:`~dask_devctx.worker.policy.Candidate` per device.
    synchronize
        Wait for the device before a task counts as done, so that work which fails is the fault of
        the task that gave it.
    oom_retries
        How often a task that ran out of a device's memory is tried again, after room was made.

    Raises
    ------
    TypeError
        ``devices`` is not a sequence.
    UnsupportedDaskError
        The installed dask or distributed lacks a name that this package uses.
    ValueError
        An argument, or the configuration that stands in for it, is out of range.

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

    def __init__(
        self,
        *,
        devices: Sequence[object] | None = None,
        devices_per_worker: int | None = None,
        tasks_per_device: int | None = None,
        unannotated: Unannotated | None = None,
        move_inputs: bool | None = None,
        replica_limit: float | None = None,
        policy: Policy = start_soonest,
        synchronize: bool | None = None,
        oom_retries: int | None = None,
    ) -> None:
        self.annotations_kept = keep_annotations()
        serialization.register()  # of this process, for what it scatters
        config.warn_of_unknown_keys()
        self.devices = options.devices(devices)
        self.devices_per_worker = options.count("devices-per-worker", devices_per_worker)
        self.tasks_per_device = options.count("tasks-per-device", tasks_per_device)
        self.unannotated = options.choice("unannotated", unannotated, ("assign", "leave"))
        self.move_inputs = options.choice("move-inputs", move_inputs, (True, False))
        self.replica_limit = options.fraction("replica-limit", replica_limit)
        self.policy = policy
        self.synchronize = options.choice("synchronize", synchronize, (True, False))
        self.oom_retries = options.count("oom-retries", oom_retries, least=0)
        options.count("history", least=0)
        switch_interval()

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that its worker uses, where it is set up on one."""
        return () if self.extension is None else self.extension.placement.devices

    def report(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return what ran where on its worker, as plain data; None where it is not set up.

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
        self.extension = DeviceExtension(
            worker,
            devices=self.devices,
            devices_per_worker=self.devices_per_worker,
            tasks_per_device=self.tasks_per_device,
            unannotated=self.unannotated,
            move_inputs=self.move_inputs,
            replica_limit=self.replica_limit,
            policy=self.policy,
            synchronize=self.synchronize,
            oom_retries=self.oom_retries,
        )
        failure = self.extension.failure
        if failure is None:
            await registration.announce(worker, self.extension.placement.devices)
        else:
            await registration.refuse(worker, failure)
            raise failure  # dask tells the client, and keeps the plugin

    async def teardown(self, worker: Worker) -> None:
        """Leave the worker as it was before :meth:`setup`; what runs, runs on to its end."""
        # Nothing is awaited in here: dask calls no hook of a plugin that it is about to replace,
        # and what begins in between would run on no device, or on another's.
        if self.extension is not None:
            self.extension.close()
            self.extension = None
            registration.withdraw(worker)
        self.annotations_kept.close()  # where it was made in this process

    def transition(self, key: Hashable, start: str, finish: str, **kwargs: Any) -> None:
        """Follow each task of the worker from state to state."""
        if self.extension is not None:
            self.extension.transition(key, start, finish)
