"""Actors on their devices: the calls and attribute reads of an actor after its constructor."""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from contextlib import ExitStack, suppress
from typing import Any, Final, Self

from distributed import Worker
from distributed.protocol import to_serialize

from dask_devctx.cuda import suspending
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import DeviceFunction, Together, known_as_the_tasks
from dask_devctx.dask_internals import worker as internals
from dask_devctx.transfer import Stamp, nbytes_by_device, stamp, to_device
from dask_devctx.worker.failures import guard
from dask_devctx.worker.failures.guard import Guard
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.tracebacks import begins_with_the_task

_POLL_S: Final = 0.01
# The time that an error may take to reach the caller of a method.
_ON_ITS_WAY_S: Final = 0.2
_METHODS_RUN_ONCE: Final = (
    "calls of actors run once, and this actor's state is lost with its worker. Make a new actor"
)

# The positional and the named arguments of a method.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


# The actors' devices, by the state of the task that made the actor: they are the same while it
# lives, also when the plugin is registered again.
_living: weakref.WeakKeyDictionary[Any, tuple[Device, ...]] = weakref.WeakKeyDictionary()


class DeviceActors(dict[Hashable, Any]):
    """A worker's actors by key; a caller of an actor's method gets a stand-in.

    dask calls an actor's methods in two ways: by a message to the worker, and directly on the same
    thread, from a method of another actor on the same worker. Both look the actor up here. All
    other code gets the actor itself. dask takes an actor out at its end.
    """

    def __init__(
        self,
        worker: Worker,
        monitor: Monitor,
        *,
        move_inputs: bool,
    ) -> None:
        super().__init__(internals.actors_of(worker))
        self._worker = worker
        self._monitor = monitor
        self._moves = move_inputs
        self._called: Hashable = None
        self._made: list[Stamp] = []
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
        _living[ts] = devices

    # -- calls

    async def answered(self) -> None:
        """Wait until the callers of actors' methods have their answers."""
        while self._unanswered:
            await asyncio.sleep(_POLL_S)

    def __getitem__(self, key: Hashable) -> Any:
        actor = super().__getitem__(key)
        made: list[Stamp] = []
        if self._called is not None and self._called == key:
            self._called, made = None, self._made
        elif not internals.in_an_actor():
            return actor
        devices = self._devices_of(key)
        if not devices:
            return actor
        method = functools.partial(
            DeviceMethod, self._monitor, key, devices, moves=self._moves, made=made
        )
        return _OnDevices(actor, devices, method)

    def _devices_of(self, key: Hashable) -> tuple[Device, ...]:
        ts = self._worker.state.tasks.get(key)
        return () if ts is None else _living.get(ts, ())

    def _executing(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        async def execute_on_device(actor: Hashable = None, **kwargs: Any) -> Any:
            made: list[Stamp] = []
            self._called, self._made = actor, made  # dask looks it up before other code runs here
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
            while not all(one.may_be_read() for one in made):  # a graph is being captured
                await asyncio.sleep(_POLL_S)
            for one in made:
                one.hold_back_readers()
            return answer

        return execute_on_device

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def read_on_device(actor: Hashable = None, **kwargs: Any) -> Any:
            devices = self._devices_of(actor)
            if not devices:
                return read(actor=actor, **kwargs)

            def answered() -> Any:  # a property may compute
                with known_as_the_tasks(devices):
                    answer = read(actor=actor, **kwargs)
                if "exception" in answer:
                    raise answer["exception"].data
                return answer

            try:
                answer = _called(self._monitor, actor, devices, answered)
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
        self, actor: Any, devices: tuple[Device, ...], method: Callable[..., DeviceMethod]
    ) -> None:
        self._actor = actor
        self._devices = devices
        self._method = method

    def __getattr__(self, name: str) -> Any:
        with Together(self._devices):
            attribute = getattr(self._actor, name)
        return self._method(attribute) if callable(attribute) else attribute


class DeviceMethod(DeviceFunction[..., Any]):
    """A method of an actor, on the actor's devices; its arguments move there.

    ``made`` gets the stamp of the work that makes its result.
    """

    def __init__(
        self,
        monitor: Monitor,
        key: Hashable,
        devices: tuple[Device, ...],
        method: Callable[..., Any],
        moves: bool,
        made: list[Stamp],
    ) -> None:
        super().__init__(devices[0], method)
        self._made = made
        self._monitor = monitor
        self._key = key
        self._devices = devices
        self._moves = moves

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        device = self._devices[0]
        with begins_with_the_task:
            if inspect.iscoroutinefunction(self.__wrapped__):
                return self._await(args, kwargs)
            body = functools.partial(self._call, args, kwargs)
            result = _called(self._monitor, self._key, self._devices, body)
            return suspending.within(device, result)

    async def _await(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def body() -> Awaitable[Any]:
            return suspending.within(self._devices[0], self._call_coroutine(args, kwargs))  # type: ignore[no-any-return]

        with begins_with_the_task:
            steps = _guard(self._monitor, self._key, self._devices, inside=False).steps()
            return await guard.run_coroutine(steps, body)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._moves:
            args, kwargs = _brought((args, kwargs), self._devices)
        with known_as_the_tasks(self._devices):
            return self._stamped(self.__wrapped__(*args, **kwargs))

    async def _call_coroutine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with known_as_the_tasks(self._devices):
            return self._stamped(await self._call(args, kwargs))

    def _stamped(self, result: Any) -> Any:
        with suppress(Exception):  # a user's type raised, or the device failed
            if (made := stamp(result)) is not None:
                self._made.append(made)
        return result


def _guard(monitor: Monitor, key: Hashable, devices: tuple[Device, ...], *, inside: bool) -> Guard:
    return Guard(monitor, key, devices, inside=inside, once=_METHODS_RUN_ONCE, is_method=True)


def _called(
    monitor: Monitor, key: Hashable, devices: tuple[Device, ...], body: Callable[[], Any]
) -> Any:
    """Return what a call of an actor's method or property returns, on the actor's devices."""
    return guard.run(_guard(monitor, key, devices, inside=True).steps(), body)


def _brought(arguments: Arguments, devices: tuple[Device, ...]) -> Arguments:
    """Return a method's arguments on its actor's devices: on the first, unless they are there."""
    if nbytes_by_device(arguments).keys() - set(devices):
        return to_device(arguments, devices[0], after=stamp(arguments))
    return arguments
