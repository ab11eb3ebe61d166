"""Actors on their devices: the calls and attribute reads of an actor after its constructor."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

from distributed import Worker

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import known_as_the_tasks
from dask_devctx.dask_internals import worker as internals
from dask_devctx.transfer import nbytes_by_device, stamp, to_device
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.guard import Guard
from dask_devctx.worker.values.host_form import wait_for

_POLL_S: Final = 0.001


class DeviceActors(dict[Hashable, Any]):
    """A worker's actors by key; a caller of an actor's method gets a stand-in.

    dask calls an actor's methods in two ways: by a message to the worker, and directly on the same
    thread, from a method of another actor on the same worker. Both look the actor up here. All
    other code gets the actor itself. dask takes an actor out at its end.
    """

    # By the state of the task that made the actor. They are the same while it lives, also when the
    # plugin is registered again.
    devices: ClassVar[weakref.WeakKeyDictionary[Any, tuple[Device, ...]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, worker: Worker, monitor: Monitor, *, move_inputs: bool) -> None:
        super().__init__(worker.state.actors)
        self._worker = worker
        self.monitor = monitor
        self.moves = move_inputs  # whether arguments come to an actor's device

    def __getitem__(self, key: Hashable) -> Any:
        actor = super().__getitem__(key)
        if internals.calls_an_actor(sys._getframe(1)):
            ts = self._worker.state.tasks.get(key)
            if ts is not None and (devices := self.devices.get(ts)):
                return _OnDevices(actor, key, devices, self)
        return actor


class _OnDevices:
    """An actor whose methods and properties run on its devices; they return finished work."""

    def __init__(
        self, actor: Any, key: Hashable, devices: tuple[Device, ...], actors: DeviceActors
    ) -> None:
        self._actor = actor
        self._method = partial(_Method, actors, key, devices)

    def __getattr__(self, name: str) -> Any:
        actor = self._actor
        if not callable(getattr(type(actor), name, None)):  # a property may compute
            return self._method(partial(getattr, actor, name))(((), {}))
        method = getattr(actor, name)
        call: Callable[..., Any]
        if inspect.iscoroutinefunction(method):

            async def call(*args: Any, **kwargs: Any) -> Any:
                return await self._method(method)((args, kwargs))
        else:

            def call(*args: Any, **kwargs: Any) -> Any:
                return self._method(method)((args, kwargs))

        return functools.wraps(method)(call)


class _Method(Guard):
    """One call of an actor's method; its data are the arguments."""

    def __init__(
        self, actors: DeviceActors, key: Hashable, devices: tuple[Device, ...], method: Any
    ) -> None:
        super().__init__(actors.monitor, key, devices)
        self._moves, self._method = actors.moves, method
        self.is_coro = inspect.iscoroutinefunction(method)

    def _call(self, data: Any) -> Any:
        args, kwargs = self._brought(data)
        with known_as_the_tasks(self.devices):
            result = self._method(*args, **kwargs)
        with suppress(Exception):  # a user's type raised, or the device failed
            if (made := stamp(result)) is not None:
                wait_for(made)
        return result

    async def _call_coroutine(self, data: Any) -> Any:
        args, kwargs = self._brought(data)
        with known_as_the_tasks(self.devices):
            result = await self._method(*args, **kwargs)
        with suppress(Exception):
            made = stamp(result)
            while made is not None and not made.done():
                await asyncio.sleep(_POLL_S)
        return result

    def _brought(self, given: Any) -> Any:
        """Return the method's arguments on the first device, unless they are on the devices."""
        if self._moves and nbytes_by_device(given).keys() - {*self.devices}:
            return to_device(given, self.devices[0], after=stamp(given))
        return given
