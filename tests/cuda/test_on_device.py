"""Each kind of function runs on the device, by each way to call it, and nobody in between."""

# ruff: noqa: PT031

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import pickle
import weakref

import cloudpickle
import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, driver, task_devices
from dask_devctx.cuda.on_device import on_device
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.errors import DeviceNotFoundError, DriverError

pytestmark = pytest.mark.usefixtures("machine")


def ordinal():
    """The ordinal of the current device, or None."""
    device = Device.current()
    return None if device is None else device.device_id


def called_by(scope):
    """A decorator that calls functions by the scope's ``run``."""
    return lambda function: functools.partial(scope.run, function)


# Ways to run a function on device 1, and whether the device is waited for.
WAYS = {
    "on_device": (lambda: on_device(1), 0),
    "run": (lambda: called_by(Device(1)), 0),
    "run of a context": (lambda: called_by(Device(1).primary_context), 0),
    "on_device, synchronize": (lambda: on_device(1, synchronize=True), 1),
}


class Way:
    """A decorator, and how often the device was waited for."""

    def __init__(self, machine, name):
        Device(1).primary_context.handle  # noqa: B018 - what nobody uses has nothing to wait for
        make, self.waits = WAYS[name]
        self.decorate, self._calls = make(), machine.faults.calls
        self._calls.clear()

    def __call__(self, function):
        return self.decorate(function)

    def waited(self, times):
        """Whether the device was waited for so often so far, if it is at all."""
        return self._calls["cuCtxSynchronize"] == times * self.waits


@pytest.fixture(params=WAYS)
def way(request, machine):
    return Way(machine, request.param)


# -- functions


@on_device(1)
def where(first=None, *, second=None):
    """Say where it runs."""
    return ordinal(), first, second


@on_device(1, synchronize=True)
def where_synchronized(first=None, *, second=None):
    """Say where it runs."""
    return ordinal(), first, second


def test_looks_like_the_function():
    for function in (where, where_synchronized):
        assert function.__doc__ == "Say where it runs."
        assert function.__module__ == __name__
        assert str(inspect.signature(function)) == "(first=None, *, second=None)"
    assert repr(where).startswith("on_device(1)(<function where at")
    assert where.which == 1
    assert where.__wrapped__() == (None, None, None)


def test_outside_of_tasks_there_are_no_devices_of_a_task():
    with pytest.raises(RuntimeError, match="works inside a task"):
        on_device(0)(task_devices)()


def test_nested():
    @on_device("cuda:2")
    def outer():
        return ordinal(), where()[0], ordinal()

    assert outer() == (2, 1, 2)
    assert on_device(3)(where)() == (1, None, None)  # the innermost wins


@pytest.mark.parametrize(
    ("which", "kind", "said"),
    [
        ("bogus", ValueError, "'bogus' names no device. A device is an ordinal"),
        ("cuda:1 ", ValueError, "'cuda:1 ' names no device. It has blanks around it"),
        ([0, 1], TypeError, r"got \[0, 1\] of type list. Several are an annotation: .*devices="),
        ("auto", ValueError, r"for annotations alone: dask.annotate\(device='auto'\)"),
        ("cpu", ValueError, r"The host is no device. to_device\(value, \"cpu\"\)"),
        (1.5, TypeError, "a device is an ordinal .* got 1.5 of type float"),
        (ordinal, TypeError, r"write @on_device\(0\) above ordinal"),  # left out
    ],
)
def test_a_name_of_no_device_is_refused_where_it_is_written(which, kind, said):
    with pytest.raises(kind, match=said) as caught:
        on_device(which)
    if kind is ValueError:  # as Device raises it, and it reaches other processes
        assert isinstance(caught.value, DeviceNotFoundError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_device_is_looked_up_when_it_is_called():
    far = on_device("GPU-eeeeeeee")(ordinal)
    with pytest.raises(DeviceNotFoundError):
        far()


@pytest.mark.parametrize("thing", [17, "fn", classmethod(ordinal), staticmethod(ordinal)])
def test_only_what_can_be_called(thing):
    with pytest.raises(TypeError, match=r"on_device\(1\) decorates something callable, got"):
        on_device(1)(thing)


class Model:
    @on_device(2)
    def method(self, x):
        return self, ordinal(), x

    @classmethod
    @on_device(2)
    def of_class(cls):
        return cls, ordinal()

    @staticmethod
    @on_device(2)
    def static(x):
        return ordinal(), x

    @on_device(2)
    async def coroutine(self):
        return ordinal()

    @on_device(2)
    def __call__(self):
        return ordinal()

    @property
    @on_device(2)
    def attribute(self):
        return ordinal()


def test_methods():
    model = Model()
    assert model.method(5) == (model, 2, 5)
    assert Model.method(model, 5) == (model, 2, 5)
    assert Model.of_class() == (Model, 2)
    assert Model.static(5) == model.static(5) == (2, 5)
    assert asyncio.run(model.coroutine()) == 2
    assert model() == 2
    assert model.attribute == 2
    assert on_device(3)(model.method)(1)[1] == 2


def test_parameters_of_any_name(way):
    @way
    def function(first, *, scope, fn, which, self):
        assert way.waited(0)
        return ordinal(), first, scope, fn, which, self

    assert function("a", scope=2, fn=3, which=4, self=5) == (1, "a", 2, 3, 4, 5)
    assert way.waited(1)
    assert ordinal() is None


# -- coroutines


def test_a_coroutine_and_who_runs_in_between(way):
    seen = []

    @way
    async def steps():
        for _ in range(10):
            assert ordinal() == 1
            await asyncio.sleep(0)
        return "done"

    async def main():
        task = asyncio.ensure_future(steps())
        while not task.done():
            seen.append((ordinal(), open_scopes()))
            await asyncio.sleep(0)
        return await task

    assert asyncio.run(main()) == "done"
    assert len(seen) >= 10
    assert set(seen) == {(None, ())}
    assert way.waited(12)  # as often as it was left


def test_a_coroutine_that_is_cancelled(way):
    log = []

    @way
    async def forever():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            log.append(ordinal())

    async def main():
        for begins in (False, True):
            task = asyncio.ensure_future(forever())
            if begins:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ordinal() is None

    asyncio.run(main())
    gc.collect()  # nobody complains of a coroutine that was never awaited
    assert log == [1]


def test_never_awaited_warns_once_with_its_own_name():
    @on_device(1)
    async def steps():
        raise AssertionError

    coroutine = steps()
    with pytest.warns(RuntimeWarning, match=r"coroutine '.*steps' was never awaited") as caught:
        del coroutine
        gc.collect()
    assert len(caught) == 1


def test_failing_restore_is_not_hidden_by_a_return(machine):
    def fail():
        machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN)

    @on_device(1)
    async def returns():
        fail()

    @on_device(1)
    def ends():
        yield 1
        fail()

    for run in (lambda: returns().send(None), lambda: list(ends())):
        with pytest.raises(DriverError):
            run()
        driver.backend().calls.set_current(0)


# -- generators


def echo(log):
    """Yield what is sent; log where each step runs."""
    received = None
    try:
        while received != "stop":
            try:
                log.append(ordinal())
                received = yield received
            except KeyError as error:
                received = f"caught {error.args[0]}"
        return "returned"
    finally:
        log.append(("closed", ordinal()))


def test_generator(way):
    log = []
    generator = way(echo)(log)
    assert next(generator) is None
    assert ordinal() is None  # left at the yield
    assert way.waited(2)
    assert generator.send("a") == "a"
    assert generator.throw(KeyError("k")) == "caught k"
    with pytest.raises(StopIteration) as stopped:
        generator.send("stop")
    assert stopped.value.value == "returned"
    assert log == [1, 1, 1, ("closed", 1)]
    assert open_scopes() == ()
    assert way.waited(5)


def test_a_generator_that_is_closed_or_dropped(way):
    log = []
    way(echo)(log).close()
    assert log == []
    generator = way(echo)(log)
    next(generator)
    del generator
    gc.collect()
    assert log == [1, ("closed", 1)]


def test_thrown_exceptions_are_not_kept():
    """A traceback holds frames, and frames hold arrays: no cycle keeps them."""

    class Array:
        pass

    @on_device(1)
    def fails():
        yield 1

    def go():
        array = Array()
        generator = fails()
        next(generator)
        with contextlib.suppress(ValueError):
            generator.throw(ValueError(array))
        return weakref.ref(array)

    gc.disable()
    try:
        assert go()() is None
    finally:
        gc.enable()


def test_an_asynchronous_generator_is_refused(way):
    async def make():
        yield 1

    with pytest.raises(TypeError, match=r"the asynchronous generator .*make cannot run in"):
        way(make)()


# -- what kind of function it is stays visible


@pytest.mark.parametrize(
    ("function", "tells", "made"),
    [
        (Model.coroutine.__wrapped__, inspect.iscoroutinefunction, None),
        (functools.partial(Model.coroutine), inspect.iscoroutinefunction, None),
        (echo, inspect.isgeneratorfunction, inspect.isgenerator),
    ],
)
def test_kind_of_function(function, tells, made):
    for decorate in (on_device(1), on_device(1, synchronize=True)):
        assert tells(decorate(function))
        assert not tells(decorate(ordinal))
        assert made is None or made(decorate(function)([]))


# -- processes

elsewhere = on_device(2)(ordinal)


def test_pickled_works(machine):
    for module in (pickle, cloudpickle):
        for function in (where, where_synchronized):  # by name, as any function of a module
            assert pickle.loads(module.dumps(function)) is function
        assert pickle.loads(module.dumps(on_device(1)(functools.partial(ordinal))))() == 1
    assert pickle.loads(pickle.dumps(elsewhere))() == 2
    assert pickle.loads(cloudpickle.dumps(on_device(3)(lambda: ordinal())))() == 3
    assert pickle.loads(pickle.dumps(on_device(Device(1))(ordinal)))() == 1
    assert pickle.loads(pickle.dumps(Model().method))(7)[1:] == (2, 7)
    machine.faults.calls.clear()
    assert pickle.loads(pickle.dumps(on_device(1, synchronize=True)(len)))("abc") == 3
    assert machine.faults.calls["cuCtxSynchronize"] == 1
