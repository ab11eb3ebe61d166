"""``on_device``: each kind of function runs on the device, and nobody who runs in between."""

# ruff: noqa: PT031

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import pickle
import sys
import types
import weakref

import cloudpickle
import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device, driver
from dask_devctx.cuda.on_device import DeviceFunction, on_device
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.cuda.suspending import call
from dask_devctx.errors import DeviceNotFoundError, DriverError

pytestmark = pytest.mark.usefixtures("machine")


def ordinal():
    """The ordinal of the current device, or None."""
    device = Device.current()
    return None if device is None else device.device_id


# -- functions


@on_device(1)
def where(first=None, *, second=None):
    """Say where it runs."""
    return ordinal(), first, second


def test_function():
    assert where("a", second="b") == (1, "a", "b")
    assert ordinal() is None


def test_looks_like_the_function():
    assert where.__name__ == "where"
    assert where.__doc__ == "Say where it runs."
    assert where.__module__ == __name__
    assert str(inspect.signature(where)) == "(first=None, *, second=None)"
    assert repr(where).startswith("on_device(1)(<function where at")
    assert where.which == 1
    assert where.__wrapped__() == (None, None, None)


def test_nested():
    @on_device("cuda:2")
    def outer():
        return ordinal(), where()[0], ordinal()

    assert outer() == (2, 1, 2)
    assert on_device(3)(where)() == (1, None, None)  # the innermost wins


def test_device_is_looked_up_when_it_is_called():
    far = on_device("GPU-eeeeeeee")(ordinal)
    with pytest.raises(DeviceNotFoundError):
        far()


@pytest.mark.parametrize(
    ("which", "kind", "said"),
    [
        ("bogus", ValueError, "'bogus' names no device. A device is an ordinal"),
        ("cuda:1 ", ValueError, "names no device. It has blanks around the name: write 'cuda:1'"),
        (["cuda:1", "cuda:x"], ValueError, "'cuda:x' names no device"),
        ("auto", ValueError, r"for annotations alone: dask.annotate\(device='auto'\)"),
        ("cpu", ValueError, r"The host is no device. to_device\(value, \"cpu\"\)"),
        (1.5, TypeError, "a device is an ordinal .* got 1.5 of type float"),
    ],
)
def test_a_name_of_no_device_is_refused_where_it_is_written(which, kind, said):
    with pytest.raises(kind, match=said) as caught:
        on_device(which)
    if kind is ValueError:  # as Device raises it, and it reaches other processes
        assert isinstance(caught.value, DeviceNotFoundError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        with pytest.raises(type(caught.value), match="no device"):
            [Device(one) for one in ([which] if isinstance(which, str) else which)]


@pytest.mark.parametrize("thing", [17, "fn", classmethod(ordinal)])
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
    @staticmethod
    def static_beneath(x):
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
    assert Model.static_beneath(5) == model.static_beneath(5) == (2, 5)
    assert asyncio.run(model.coroutine()) == 2
    assert model() == 2
    assert model.attribute == 2
    assert on_device(3)(model.method)(1)[1] == 2


def test_parameters_of_any_name():
    def function(scope, fn, which, self):
        return ordinal(), scope, fn, which, self

    decorated = on_device(1)(function)
    assert decorated(scope=2, fn=3, which=4, self=5) == (1, 2, 3, 4, 5)
    assert call(Device(1), function, scope=2, fn=3, which=4, self=5) == (1, 2, 3, 4, 5)
    assert Device(1).run(function, scope=2, fn=3, which=4, self=5) == (1, 2, 3, 4, 5)


# -- what kind of function it is stays visible


async def coroutine_function():
    return ordinal()


def generator_function():
    yield ordinal()


async def async_generator_function():
    yield ordinal()


@pytest.mark.parametrize(
    ("function", "tells"),
    [
        (coroutine_function, inspect.iscoroutinefunction),
        (coroutine_function, asyncio.iscoroutinefunction)
        if sys.version_info < (3, 14)
        else (coroutine_function, inspect.iscoroutinefunction),
        (generator_function, inspect.isgeneratorfunction),
        (async_generator_function, inspect.isasyncgenfunction),
        (functools.partial(coroutine_function), inspect.iscoroutinefunction),
    ],
)
def test_kind_of_function(function, tells):
    assert tells(on_device(1)(function))
    assert not tells(on_device(1)(ordinal))


def test_kind_of_what_it_returns():
    coroutine = on_device(1)(coroutine_function)()
    generator = on_device(1)(generator_function)()
    asynchronous = on_device(1)(async_generator_function)()
    assert inspect.iscoroutine(coroutine)
    assert inspect.isgenerator(generator)
    assert inspect.isasyncgen(asynchronous)
    assert coroutine.__qualname__ == "coroutine_function"
    assert generator.__qualname__ == "generator_function"
    assert asynchronous.__qualname__ == "async_generator_function"
    coroutine.close()


# -- coroutines


@on_device(1)
async def steps(log, count=3):
    for _ in range(count):
        log.append(ordinal())
        await asyncio.sleep(0)
    log.append(ordinal())
    return "done"


def test_nothing_leaks_to_who_runs_in_between():
    seen = []

    async def between(stop):
        while not stop.is_set():
            seen.append((ordinal(), open_scopes()))
            await asyncio.sleep(0)

    async def main():
        stop = asyncio.Event()
        task = asyncio.ensure_future(between(stop))
        await steps([], 10)
        stop.set()
        await task

    asyncio.run(main())
    assert len(seen) >= 10
    assert set(seen) == {(None, ())}


def test_many_interleaved_on_one_loop():
    async def work(mine):
        for n in range(20):
            assert ordinal() == mine, n
            await asyncio.sleep(0 if n % 3 else 0.0005)
            assert ordinal() == mine, n
            with Device((mine + 1) % 4):
                assert ordinal() == (mine + 1) % 4
        return mine

    async def main():
        return await asyncio.gather(*(on_device(n % 4)(work)(n % 4) for n in range(40)))

    assert asyncio.run(main()) == [n % 4 for n in range(40)]
    assert ordinal() is None


def test_cancelled_while_it_waits():
    log = []

    @on_device(1)
    async def waits():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append(ordinal())
            raise
        finally:
            await asyncio.sleep(0)
            log.append(ordinal())

    async def main():
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert log == [1, 1]


def test_cancelled_before_it_started():
    """Nothing is entered, and nobody complains of a coroutine that was never awaited."""

    async def main():
        task = asyncio.ensure_future(steps([]))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()


def test_never_awaited_warns_once_with_its_own_name():
    coroutine = steps([])
    with pytest.warns(RuntimeWarning, match="coroutine 'steps' was never awaited") as caught:
        del coroutine
        gc.collect()
    assert len(caught) == 1


def test_failing_restore_is_not_hidden_by_a_return(machine):
    @on_device(1)
    async def returns():
        machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN)
        return "value"

    @on_device(1)
    def ends():
        yield 1
        machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN)

    @on_device(1)
    async def ends_too():
        yield 1
        machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN)

    async def all_of(asynchronous):
        return [item async for item in asynchronous]

    try:
        with pytest.raises(DriverError):
            returns().send(None)
        with pytest.raises(DriverError):
            list(ends())
        with pytest.raises(DriverError):
            asyncio.run(all_of(ends_too()))
    finally:
        driver.backend().calls.set_current(0)


# -- generators


@on_device(1)
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


def test_generator():
    log = []
    generator = echo(log)
    assert next(generator) is None
    assert ordinal() is None  # left at the yield
    assert generator.send("a") == "a"
    assert generator.throw(KeyError("k")) == "caught k"
    with pytest.raises(StopIteration) as stopped:
        generator.send("stop")
    assert stopped.value.value == "returned"
    assert log == [1, 1, 1, ("closed", 1)]
    assert open_scopes() == ()


def test_generator_closed_before_it_started():
    log = []
    echo(log).close()
    assert log == []


def test_generator_dropped():
    log = []
    generator = echo(log)
    next(generator)
    del generator
    gc.collect()
    assert log == [1, ("closed", 1)]


def test_coroutine_of_a_decorated_generator():
    @on_device(1)
    @types.coroutine
    def old_style():
        before = ordinal()
        yield from asyncio.sleep(0).__await__()
        return before, ordinal()

    async def main():
        return await old_style(), ordinal()

    assert asyncio.run(main()) == ((1, 1), None)


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


# -- asynchronous generators


@on_device(1)
async def async_echo(log):
    received = None
    try:
        while received != "stop":
            try:
                await asyncio.sleep(0)
                log.append(ordinal())
                received = yield received
            except KeyError as error:
                received = f"caught {error.args[0]}"
    finally:
        await asyncio.sleep(0)
        log.append(("closed", ordinal()))


def test_async_generator():
    async def main():
        log = []
        generator = async_echo(log)
        assert await anext(generator) is None
        assert ordinal() is None
        assert await generator.asend("a") == "a"
        assert await generator.athrow(KeyError("k")) == "caught k"
        assert await anext(generator) is None
        with pytest.raises(StopAsyncIteration):
            await generator.asend("stop")
        with pytest.raises(StopAsyncIteration):
            await anext(generator)
        return log

    assert asyncio.run(main()) == [1, 1, 1, 1, ("closed", 1)]


def test_async_generator_closed():
    async def main():
        log = []
        generator = async_echo(log)
        await anext(generator)
        await generator.aclose()
        await generator.aclose()
        unstarted = async_echo(log)
        await unstarted.aclose()
        return log

    assert asyncio.run(main()) == [1, ("closed", 1)]


def test_async_generator_dropped_is_closed_by_the_loop():
    async def main():
        log = []
        generator = async_echo(log)
        await anext(generator)
        del generator
        gc.collect()
        for _ in range(10):
            await asyncio.sleep(0)
        return log

    assert asyncio.run(main()) == [1, ("closed", 1)]


def test_async_generators_left_to_the_end_of_the_loop():
    """The loop closes those it knows in any order; it must know ours only, and not the inner."""
    log, kept, complaints = [], [], []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        for _ in range(30):
            kept.append(async_echo(log))
            await anext(kept[-1])

    asyncio.run(main())
    assert log == [1] * 30 + [("closed", 1)] * 30
    assert complaints == []


# -- threads and processes


def plain():
    return ordinal()


elsewhere = on_device(2)(plain)


@pytest.mark.parametrize(
    "function",
    [where, elsewhere, steps, Model.method, Model().static, on_device(1)(functools.partial(plain))],
)
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_pickles(function, module):
    there = pickle.loads(module.dumps(function))
    assert repr(there) == repr(function) or isinstance(there, DeviceFunction)
    if function in (where, steps):
        assert there is function  # by name, as any function of a module


def test_pickled_works(machine):
    assert pickle.loads(pickle.dumps(elsewhere))() == 2
    assert pickle.loads(cloudpickle.dumps(on_device(3)(lambda: ordinal())))() == 3
    assert pickle.loads(pickle.dumps(on_device(Device(1))(plain)))() == 1
    assert pickle.loads(pickle.dumps(Model().method))(7)[1:] == (2, 7)


_MAIN = """
import subprocess, sys
import cloudpickle
from dask_devctx import Device
from dask_devctx.cuda.on_device import on_device

@on_device(2)
def decorated(x):
    return Device.current().device_id, x

sys.stdout.buffer.write(cloudpickle.dumps(decorated))
"""


def test_cloudpickled_from_main(child):
    """A notebook's function runs in a process that has another ``__main__``."""
    import subprocess

    sent = subprocess.run([sys.executable, "-c", _MAIN], capture_output=True, check=True).stdout
    assert pickle.loads(sent)("x") == (2, "x")


# -- call and within, which other wrappers use


@pytest.mark.parametrize("make", [Device, lambda number: Device(number).primary_context])
def test_run(make):
    """``device.run`` and ``context.run`` do not lose the device of what suspends."""
    scope = make(1)

    async def main():
        async def coroutine():
            before = ordinal()
            await asyncio.sleep(0)
            return before, ordinal()

        running = [scope.run(coroutine), Device(2).run(coroutine)]
        assert ordinal() is None
        return await asyncio.gather(*running)

    assert asyncio.run(main()) == [(1, 1), (2, 2)]
    for seen in scope.run(generator_function):
        assert (seen, ordinal()) == (1, None)
    assert scope.run(ordinal) == 1


def test_the_device_is_not_left_out():
    with pytest.raises(TypeError, match=r"write @on_device\(1\)"):

        @on_device
        def task():
            raise AssertionError
