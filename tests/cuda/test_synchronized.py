"""``synchronized()``: a scope that waits for its work before it restores."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from contextlib import closing

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Context, Device, driver, on_device
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.errors import DeviceScopeError, DriverError

FAILED = CUresult.CUDA_ERROR_LAUNCH_FAILED


@pytest.fixture(params=["device", "primary", "own"])
def scope(request, machine):
    """A device, its primary context, and an own one."""
    Device(1).primary_context.handle  # noqa: B018 - what nobody uses has nothing to wait for
    if request.param == "own":
        with closing(Context(1)) as own:
            yield own
    else:
        yield Device(1) if request.param == "device" else Device(1).primary_context


@pytest.fixture
def waits(machine):
    """Where the driver was told to wait: the devices that were current."""
    seen = []

    def look(*args):
        seen.append(Device.current())
        return False

    machine.faults.inject("cuCtxSynchronize", CUresult.CUDA_SUCCESS, when=look)
    return seen


# -- as a scope


def test_waits_before_it_restores(scope, waits):
    with Device(0), scope.synchronized() as entered:
        assert entered is scope
        assert Device.current() is Device(1)
        assert waits == []
    assert waits == [Device(1)]
    assert Device.current() is None


def test_is_reusable_and_reentrant(scope, waits):
    synchronized = scope.synchronized()
    for count in (1, 2):
        with synchronized:
            assert open_scopes() == (scope,)
        assert len(waits) == count
    with synchronized, Device(2), synchronized, synchronized:
        assert open_scopes() == (scope, Device(2), scope, scope)
    assert waits == [Device(1)] * 5
    assert Device.current() is None


def test_raises_what_it_found(scope, machine):
    machine.faults.inject("cuCtxSynchronize", FAILED)
    with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED"), scope.synchronized():
        pass
    assert Device.current() is None
    assert open_scopes() == ()


def test_notes_what_it_found_on_the_bodys_own(scope, machine):
    machine.faults.inject("cuCtxSynchronize", FAILED)
    with pytest.raises(ZeroDivisionError) as caught, scope.synchronized():
        1 / 0  # noqa: B018
    (note,) = caught.value.__notes__
    assert "CUDA_ERROR_LAUNCH_FAILED" in note
    assert Device.current() is None


def test_an_interrupted_wait_restores(scope, machine):
    def interrupt(*args):
        raise KeyboardInterrupt

    machine.faults.inject("cuCtxSynchronize", FAILED, when=interrupt)
    with Device(2):
        with pytest.raises(KeyboardInterrupt), scope.synchronized():
            pass
        assert open_scopes() == (Device(2),)
        assert Device.current() is Device(2)
    machine.faults.clear()


def test_a_wait_and_a_restore_that_both_fail(machine):
    own = Context(0)
    own.set_current()
    synchronized = Device(1).synchronized()
    synchronized.__enter__()
    machine.faults.inject("cuCtxSynchronize", FAILED)
    own.close()
    with pytest.raises(DriverError, match="cuCtxSynchronize") as caught:
        synchronized.__exit__(None, None, None)
    assert "which was destroyed in the meantime" in caught.value.__notes__[0]
    assert Device.current() is None


def test_what_the_body_left_current_is_dead(scope, waits):
    theirs = Context(3)
    with Device(0):
        with scope.synchronized():
            theirs.set_current()
            thread = threading.Thread(target=theirs.close)  # here it would not stay current
            thread.start()
            thread.join()
        assert waits == [Device(1)]
        assert Device.current() is Device(0)


def test_closed_inside(machine):
    own = Context(1)
    with pytest.raises(DeviceScopeError, match="this context was closed"), own.synchronized():
        own.close()
    assert Device.current() is None
    assert open_scopes() == ()


def test_on_both_drivers(backend):
    with Device(0).synchronized() as device, Context.temporary(0) as own, own.synchronized():
        assert Device.current() is device
        backend.calls.work.free(backend.calls.work.allocate(1 << 20))
    assert Device.current() is None


# -- as a decorator


@pytest.fixture(params=["synchronized", "on_device"])
def decorate(request, machine):
    """Two ways to write one thing."""
    Device(1).primary_context.handle  # noqa: B018
    if request.param == "on_device":
        return on_device(1, synchronize=True)
    return Device(1).synchronized()


def test_a_function(decorate, waits):
    @decorate
    def where(x, *, y=None):
        """Say where it runs."""
        assert waits == []
        return Device.current(), x, y

    assert where(1, y=2) == (Device(1), 1, 2)
    assert waits == [Device(1)]
    assert Device.current() is None
    assert where.__name__ == "where"
    assert where.__doc__ == "Say where it runs."
    assert str(inspect.signature(where)) == "(x, *, y=None)"


def test_a_coroutine_waits_once_at_its_end(decorate, waits):
    @decorate
    async def steps(count):
        for _ in range(count):
            assert Device.current() is Device(1)
            assert waits == []
            await asyncio.sleep(0)
        return "done"

    async def main():
        seen = []
        task = asyncio.create_task(steps(3))
        while not task.done():
            seen.append(Device.current())
            await asyncio.sleep(0)
        return await task, set(seen)

    assert inspect.iscoroutinefunction(steps)
    assert asyncio.run(main()) == ("done", {None})
    assert waits == [Device(1)]


def test_a_coroutine_that_is_cancelled(decorate, waits):
    @decorate
    async def forever():
        await asyncio.sleep(1000)

    async def main():
        before = asyncio.create_task(forever())
        before.cancel()  # before it started: nothing to wait for
        with pytest.raises(asyncio.CancelledError):
            await before
        assert waits == []
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert Device.current() is None

    asyncio.run(main())
    assert waits == [Device(1)]


def test_a_generator_waits_before_each_item(decorate, waits):
    @decorate
    def items():
        for number in range(2):
            assert Device.current() is Device(1)
            yield number
        return "end"

    assert inspect.isgeneratorfunction(items)
    generator = items()
    assert waits == []
    assert next(generator) == 0
    assert len(waits) == 1
    assert Device.current() is None
    assert next(generator) == 1
    with pytest.raises(StopIteration) as caught:
        next(generator)
    assert caught.value.value == "end"
    assert waits == [Device(1)] * 3


def test_an_asynchronous_generator_waits_before_each_item(decorate, waits):
    @decorate
    async def items():
        for number in range(2):
            await asyncio.sleep(0)
            assert len(waits) == number  # not at an await
            yield number

    async def main():
        seen = []
        async for number in items():
            assert Device.current() is None
            seen.append((number, len(waits)))
        return seen

    assert inspect.isasyncgenfunction(items)
    assert asyncio.run(main()) == [(0, 1), (1, 2)]
    assert waits == [Device(1)] * 3


@Device(1).synchronized()
def of_the_module():
    return Device.current()


def test_pickles(machine):
    for function in (Device(1).synchronized()(len), on_device(1, synchronize=True)(len)):
        machine.faults.calls.clear()
        assert pickle.loads(pickle.dumps(function))("abc") == 3
        assert machine.faults.calls["cuCtxSynchronize"] == 1
    assert pickle.loads(pickle.dumps(of_the_module)) is of_the_module


# -- a restore that fails after the function has returned


def _with_a_restore_that_fails(call):
    """Call it where the context that was current is destroyed by the function; the error."""
    own = Context(0)
    own.set_current()

    def compute():
        own.close()
        return [1, 2, 3]

    with pytest.raises(DeviceScopeError, match="which was destroyed in the meantime") as caught:
        call(compute)
    assert driver.backend().current_context() == 0
    return caught.value


@pytest.mark.parametrize(
    "call",
    [
        lambda fn: Device(1).run(fn),
        lambda fn: on_device(1)(fn)(),
        lambda fn: Device(1).synchronized().run(fn),
        lambda fn: Device(1).primary_context.run(fn),
    ],
)
def test_what_a_function_returned_is_not_lost(machine, call):
    error = _with_a_restore_that_fails(call)
    assert error.result == [1, 2, 3]
    assert error.__notes__ == [
        "The function had returned a list: it is this error's attribute 'result'"
    ]
    sent = pickle.loads(pickle.dumps(error))  # to another process goes the error alone
    assert not hasattr(sent, "result")
    assert sent.__notes__ == error.__notes__
