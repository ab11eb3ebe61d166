"""Actors on their devices: the calls and attribute reads of an actor after its constructor."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from typing import Any, Self

from distributed import Worker
from distributed.protocol import to_serialize

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import Together
from dask_devctx.dask_internals import worker as internals
from dask_devctx.transfer import nbytes_by_device, stamp, to_device
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.failures.others import Others
from dask_devctx.worker.task import Arguments, Bring, DeviceMethod, monitored_method

_POLL_S = 0.01
# The time that an error may take to reach the caller of a method.
_ON_ITS_WAY_S = 0.2

# The actors' devices, by the state of the task that made the actor. An actor keeps its devices
# while it lives, also when the plugin is registered again.
_devices: weakref.WeakKeyDictionary[Any, tuple[Device, ...]] = weakref.WeakKeyDictionary()


class DeviceActors(dict[Hashable, Any]):
    """A worker's actors by key; a caller of an actor's method gets a stand-in.

    Parameters
    ----------
    worker
        The worker, whose dictionary of actors this replaces while it is entered.
    monitor
        Monitors the calls of their methods.
    move_inputs
        Whether a method's arguments are copied to its actor's device.

    Notes
    -----
    dask calls an actor's methods in two ways: by a message to the worker, and directly on the same
    thread, from a method of another actor on the same worker. Both look the actor up here. All
    other code gets the actor itself.
    """

    def __init__(self, worker: Worker, monitor: Monitor, *, move_inputs: bool) -> None:
        super().__init__(internals.actors_of(worker))
        self._worker = worker
        self._monitor = monitor
        self._bring = _brought if move_inputs else None
        self._called: Hashable = None
        self._unanswered: Counter[Hashable] = Counter()
        self._steps = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as steps:
            for op, wrap in (
                ("actor_execute", self._executing),
                ("actor_attribute", self._reading),
            ):
                steps.enter_context(internals.wrapped_handler(self._worker, op, wrap))
            steps.enter_context(internals.replaced_actors(self._worker, self))
            self._steps = steps.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the worker; running calls end on their devices."""
        self._steps.close()

    def live_on(self, ts: Any, devices: tuple[Device, ...]) -> None:
        """Note the devices of the actor that a task makes."""
        _devices[ts] = devices

    async def answered(self) -> None:
        """Wait until the callers of actors' methods have their answers."""
        while self._unanswered:
            await asyncio.sleep(_POLL_S)

    def __getitem__(self, key: Hashable) -> Any:
        actor = super().__getitem__(key)
        if self._called is not None and self._called == key:
            self._called = None
        elif not internals.in_an_actor():
            return actor
        devices = self._devices_of(key)
        if not devices:
            return actor
        return _OnDevices(actor, devices, key, self._monitor, self._bring)

    def _devices_of(self, key: Hashable) -> tuple[Device, ...]:
        ts = self._worker.state.tasks.get(key)
        return () if ts is None else _devices.get(ts, ())

    def _executing(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        async def execute_on_device(actor: Hashable = None, **kwargs: Any) -> Any:
            self._called = actor  # dask looks it up before other code runs on this loop
            self._unanswered[actor] += 1
            failed = True
            try:
                answer = await execute(actor=actor, **kwargs)
                failed = answer["status"] != "OK"
            finally:
                self._called = None
                if failed:  # the error is sent after this returns
                    self._worker.loop.call_later(_ON_ITS_WAY_S, self._has_answered, actor)
                else:
                    self._has_answered(actor)
            return self._to_send(actor, answer)

        return execute_on_device

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def read_on_device(actor: Hashable = None, **kwargs: Any) -> Any:
            devices = self._devices_of(actor)
            if not devices:
                return read(actor=actor, **kwargs)
            try:
                with (  # a property may compute
                    monitored_method(self._monitor, actor, devices[0]),
                    Others(self._monitor, actor, devices),
                ):
                    answer = read(actor=actor, **kwargs)
                    if "exception" in answer:
                        raise answer["exception"].data
            except Exception as error:
                return {"status": "error", "exception": to_serialize(error)}
            return self._to_send(actor, answer)

        return read_on_device

    def _has_answered(self, actor: Hashable) -> None:
        self._unanswered[actor] -= 1
        if not self._unanswered[actor]:
            del self._unanswered[actor]

    def _to_send(self, key: Hashable, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an actor's answer; its readers wait for the work that makes it."""
        if self._devices_of(key) and "result" in answer:
            with suppress(Exception):  # a user's type raised, or the device failed
                made = stamp(answer["result"].data)
                if made is not None:
                    made.hold_back_readers()
        return answer


class _OnDevices:
    """An actor whose methods run on its devices."""

    def __init__(
        self,
        actor: Any,
        devices: tuple[Device, ...],
        key: Hashable,
        monitor: Monitor,
        bring: Bring | None,
    ) -> None:
        self._actor = actor
        self._devices = devices
        self._key = key
        self._monitor = monitor
        self._bring = bring

    def __getattr__(self, name: str) -> Any:
        with Together(self._devices):
            attribute = getattr(self._actor, name)
        if not callable(attribute):
            return attribute
        return DeviceMethod(self._monitor, self._key, self._devices, attribute, self._bring)


def _brought(arguments: Arguments, devices: tuple[Device, ...]) -> Arguments:
    """Return a method's arguments on its actor's devices: on the first, unless they are there."""
    if nbytes_by_device(arguments).keys() - set(devices):
        return to_device(arguments, devices[0], after=stamp(arguments))
    return arguments
