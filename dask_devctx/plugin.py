"""The worker plugin: from a task's key to its device, and back to the worker as it was."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from distributed import Worker, WorkerPlugin

from dask_devctx import config, tasks
from dask_devctx.annotations import AUTO, Unannotated, requested_device
from dask_devctx.assignment import Policy, start_soonest
from dask_devctx.device import Device, devices
from dask_devctx.errors import DeviceFailedError, DeviceNotFoundError
from dask_devctx.failures import Guard, GuardedTask, end_failed_worker
from dask_devctx.pinned import PinnedTask
from dask_devctx.placement import Placement
from dask_devctx.pools import DevicePool, near_cpus

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
    tasks_per_device
        How many tasks run on a device at a time.
    unannotated
        ``"assign"`` gives a task without a ``device`` annotation a device; ``"leave"`` leaves it on
        dask's own threads without one.
    policy
        Chooses the device of a task that names none, given one
        :class:`~dask_devctx.assignment.Candidate` per device.
    synchronize
        Wait for the device before a task counts as done, so that work which fails is the fault of
        the task that gave it.
    oom_retries
        How often a task that ran out of a device's memory is tried again, after room was made.

    Raises
    ------
    ValueError
        An argument, or the configuration that stands in for it, is out of range.

    Notes
    -----
    What is not given is taken from dask's configuration (``devctx.*``) where the plugin is made.
    It works on a cluster that is running and on workers that join later, and is wholly undone by
    ``client.unregister_worker_plugin("devctx")``, while tasks run.

    Examples
    --------
    >>> from distributed import Client, LocalCluster
    >>> with LocalCluster(processes=False, dashboard_address=None) as cluster, Client(cluster) as c:
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
        tasks_per_device: int | None = None,
        unannotated: Unannotated | None = None,
        policy: Policy = start_soonest,
        synchronize: bool | None = None,
        oom_retries: int | None = None,
    ) -> None:
        self.devices = config.get("devices", devices)
        self.tasks_per_device = config.get("tasks-per-device", tasks_per_device)
        self.unannotated = config.get("unannotated", unannotated)
        self.policy = policy
        self.synchronize = config.get("synchronize", synchronize)
        self.oom_retries = config.get("oom-retries", oom_retries)
        _check_count("tasks_per_device", self.tasks_per_device, least=1)
        _check_count("oom_retries", self.oom_retries, least=0)
        if not isinstance(self.synchronize, bool):
            raise ValueError(f"synchronize must be True or False, got {self.synchronize!r}")
        if self.unannotated not in ("assign", "leave"):
            raise ValueError(f"unannotated must be 'assign' or 'leave', got {self.unannotated!r}")

    # -- dask's hooks

    def setup(self, worker: Worker) -> None:
        """Take the worker's tasks in hand; those that run already are left as they are."""
        self.worker = worker
        self.placement = Placement(
            _worker_devices(self.devices), self.tasks_per_device, self.policy
        )
        self.pools = {
            f"devctx:{device}": DevicePool(
                f"devctx-{device}", self.tasks_per_device, near_cpus(device.info.cpu_affinity)
            )
            for device in self.placement.devices
        }
        worker.executors.update(self.pools)
        self.guard = Guard(
            self.placement.devices,
            synchronize=self.synchronize,
            oom_retries=self.oom_retries,
            on_failure=self._on_failure,
        )
        worker.metrics["devctx-failures"] = lambda worker: self.guard.metrics()
        self._actor_devices: dict[Hashable, Device] = {}
        self._actor_execute = worker.handlers["actor_execute"]
        worker.handlers["actor_execute"] = self._pinned_actor_execute

    def teardown(self, worker: Worker) -> None:
        """Leave the worker as it was before :meth:`setup`; what runs, runs on to its end."""
        for ts in worker.state.tasks.values():
            self._unpin(ts)
        worker.handlers["actor_execute"] = self._actor_execute
        worker.metrics.pop("devctx-failures", None)
        self.guard.close()
        for name, pool in self.pools.items():
            del worker.executors[name]
            pool.shutdown(wait=False)

    def transition(self, key: Hashable, start: str, finish: str, **kwargs: Any) -> None:
        """Pin a task that is about to be executed; stop counting one that is done."""
        ts = self.worker.state.tasks.get(key)
        # A task that was cancelled and asked for again comes back to "executing" without a
        # transition to it, so what counts is the state and not `finish`.
        if ts is not None and ts.state == "executing":
            if not isinstance(ts.run_spec, PinnedTask):
                self._pin(ts)
        elif key in self.placement and (ts is None or ts.state not in _UNDER_WAY):
            self._done(key, ts)

    # -- a task's way

    def _pin(self, ts: Any) -> None:
        """Wrap the task, and send it to its device's threads unless it asked for others."""
        executor = ts.annotations.get("executor")
        try:
            wanted = requested_device(ts.annotations, ts.key, self.unannotated)
            if wanted is None:
                return
            movable = wanted == AUTO
            if movable:
                wanted = self.guard.retries.redirect(ts.key) or wanted
            device = self.placement.place(ts.key, ts.prefix, wanted)
        except Exception as error:  # raised here, dask would log it and run the task unpinned
            failure = error.with_traceback(None)  # where it was found says nothing to the user
            ts.run_spec = PinnedTask(ts.run_spec, failure, ts.priority)
        else:
            if ts.key in self.worker.state.actors:
                self._actor_devices[ts.key] = device
            if executor is None:
                ts.annotations = {**ts.annotations, "executor": f"devctx:{device}"}
            call = GuardedTask(self.guard, ts.key, movable)
            ts.run_spec = PinnedTask(ts.run_spec, device, ts.priority, call)

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

    # -- when a device fails

    def _on_failure(self, error: DeviceFailedError, key: Hashable) -> None:
        """End the worker; called on the thread of the task that noticed."""
        self.worker.loop.add_callback(end_failed_worker, self.worker, error, key)

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


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")


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
