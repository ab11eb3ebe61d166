"""The worker plugin: from a task's key to its device, and back to the worker as it was."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from distributed import Worker, WorkerPlugin

from dask_devctx import config, membership, splitting, tasks
from dask_devctx.annotations import Unannotated, requested_device
from dask_devctx.assignment import Policy, start_soonest
from dask_devctx.device import Device, devices
from dask_devctx.errors import DeviceNotFoundError
from dask_devctx.pinned import PinnedTask
from dask_devctx.placement import Placement
from dask_devctx.pools import DeviceThreadPoolExecutor, near_cpus
from dask_devctx.record import Record

logger = logging.getLogger(__name__)

# In these states a task's thread may still be running it.
_UNDER_WAY = frozenset({"executing", "cancelled", "resumed"})


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
        How many tasks run on a device at a time.
    unannotated
        ``"assign"`` gives a task without a ``device`` annotation a device; ``"leave"`` leaves it on
        dask's own threads without one.
    policy
        Chooses the device of a task that names none, given one
        :class:`~dask_devctx.assignment.Candidate` per device.

    Raises
    ------
    ValueError
        An argument, or the configuration that stands in for it, is out of range.

    Notes
    -----
    What is not given is taken from dask's configuration (``devctx.*``) where the plugin is made.
    It works on a cluster that is running and on workers that join later, and is wholly undone by
    ``client.unregister_worker_plugin("devctx")``, while tasks run. A worker that joins and finds
    too few devices free for ``devices_per_worker`` leaves again.

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

    def __init__(
        self,
        *,
        devices: Sequence[object] | None = None,
        devices_per_worker: int | None = None,
        tasks_per_device: int | None = None,
        unannotated: Unannotated | None = None,
        policy: Policy = start_soonest,
    ) -> None:
        self.devices = config.get("devices", devices)
        self.devices_per_worker = config.get("devices-per-worker", devices_per_worker)
        self.tasks_per_device = config.get("tasks-per-device", tasks_per_device)
        self.unannotated = config.get("unannotated", unannotated)
        self.policy = policy
        self.share: splitting.Share | None = None
        _check_count("tasks_per_device", self.tasks_per_device)
        if self.devices_per_worker is not None:
            _check_count("devices_per_worker", self.devices_per_worker)
        if self.unannotated not in ("assign", "leave"):
            raise ValueError(f"unannotated must be 'assign' or 'leave', got {self.unannotated!r}")

    # -- dask's hooks

    async def setup(self, worker: Worker) -> None:
        """Take the worker's tasks in hand; those that run already are left as they are."""
        try:
            self._install(worker)
        except Exception as error:
            await membership.refuse(worker, error)
            raise
        await membership.announce(worker, self.placement.devices)

    async def teardown(self, worker: Worker) -> None:
        """Leave the worker as it was before :meth:`setup`; what runs, runs on to its end."""
        self._uninstall(worker)
        worker.metrics.pop(Record.metric, None)
        if self.share is not None:
            self.share.release()
        await membership.withdraw(worker)

    def _install(self, worker: Worker) -> None:
        self.worker = worker
        self.share = self._take(worker)
        self.placement = Placement(self.share.devices, self.tasks_per_device, self.policy)
        self.record = Record(self.placement.devices, self.tasks_per_device)
        worker.metrics[Record.metric] = self.record.metrics
        self.pools = {
            f"devctx:{device}": DeviceThreadPoolExecutor(
                f"devctx-{device}", self.tasks_per_device, near_cpus(device.info.cpu_affinity)
            )
            for device in self.placement.devices
        }
        worker.executors.update(self.pools)
        self._actor_devices: dict[Hashable, Device] = {}
        self._actor_execute = worker.handlers["actor_execute"]
        worker.handlers["actor_execute"] = self._pinned_actor_execute

    def _uninstall(self, worker: Worker) -> None:
        if self.share is None:
            return  # it was never installed
        for ts in worker.state.tasks.values():
            self._unpin(ts)
        worker.handlers["actor_execute"] = self._actor_execute
        for name, pool in self.pools.items():
            del worker.executors[name]
            pool.shutdown(wait=False)

    def _take(self, worker: Worker) -> splitting.Share:
        found = _worker_devices(self.devices)
        if self.devices_per_worker is None:
            return splitting.Share(found)
        return splitting.take(
            found,
            self.devices_per_worker,
            holder=f"worker {worker.name}",
            directory=config.get("lock-directory"),
        )

    def transition(self, key: Hashable, start: str, finish: str, **kwargs: Any) -> None:
        """Pin a task that is about to be executed; stop counting one that is done."""
        ts = self.worker.state.tasks.get(key)
        # A task that was cancelled and asked for again comes back to "executing" without a
        # transition to it, so what counts is the state and not `finish`.
        if ts is not None and ts.state == "executing":
            if not isinstance(ts.run_spec, PinnedTask):
                self._pin(ts)
        elif key in self.placement and (ts is None or ts.state not in _UNDER_WAY):
            self.record.left(key, ts)
            self._done(key, ts)

    # -- a task's way

    def _pin(self, ts: Any) -> None:
        """Wrap the task, and send it to its device's threads unless it asked for others."""
        executor = ts.annotations.get("executor")
        try:
            wanted = requested_device(ts.annotations, ts.key, self.unannotated)
            if wanted is None:
                return
            device = self.placement.place(ts.key, ts.prefix, wanted)
            self.record.placed(ts, device)
        except Exception as error:  # raised here, dask would log it and run the task unpinned
            failure = error.with_traceback(None)  # where it was found says nothing to the user
            ts.run_spec = PinnedTask(ts.run_spec, failure, ts.priority)
        else:
            if ts.key in self.worker.state.actors:
                self._actor_devices[ts.key] = device
            if executor is None:
                ts.annotations = {**ts.annotations, "executor": f"devctx:{device}"}
            ts.run_spec = PinnedTask(ts.run_spec, device, ts.priority)

    def _unpin(self, ts: Any) -> None:
        if isinstance(ts.run_spec, PinnedTask):
            ts.run_spec = ts.run_spec.task
        if ts.annotations and ts.annotations.get("executor") in self.pools:
            ts.annotations = {k: v for k, v in ts.annotations.items() if k != "executor"}

    def _done(self, key: Hashable, ts: Any) -> None:
        self.placement.remove(key)
        if ts is not None:
            for times in ts.startstops:
                if times["action"] == "compute":
                    self.placement.took(ts.prefix, times["stop"] - times["start"])

    # -- actors

    async def _pinned_actor_execute(self, actor: Hashable = None, **kwargs: Any) -> Any:
        """Call an actor's method on the device that the actor was made on."""
        running = self._actor_execute(actor=actor, **kwargs)
        device = self._actor_devices.get(actor)
        if device is None:
            return await running
        swap = _PinnedMethods(self.worker.state.actors, actor, device)
        return await tasks.awaiting(swap, running)


class _PinnedMethods:
    """While entered, an actor's methods run on its device.

    Entered whenever dask's own handler is resumed, and left whenever it suspends: only the handler
    sees the stand-in.
    """

    def __init__(self, actors: dict[Hashable, Any], key: Hashable, device: Device) -> None:
        self._actors = actors
        self._key = key
        self._device = device
        self._actor: Any = None

    def __enter__(self) -> None:
        self._actor = self._actors[self._key]
        self._actors[self._key] = self

    def __exit__(self, *exc_info: object) -> None:
        self._actors[self._key] = self._actor

    def __getattr__(self, name: str) -> Any:
        return tasks.DeviceFunction(self._device, getattr(self._actor, name))


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more, got {count!r}")


def _worker_devices(wanted: Sequence[object] | None) -> tuple[Device, ...]:
    found = devices() if wanted is None else tuple(dict.fromkeys(Device(one) for one in wanted))
    if not found:
        raise DeviceNotFoundError(
            "any",
            (),
            None,
            "The worker sees no GPU: check CUDA_VISIBLE_DEVICES, or give it devices",
        )
    return found
