"""The device scope: each sentence of what it promises, and the ways in which it is left."""

# ruff: noqa: F821 - some run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import asyncio
import copy
import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from cuda.bindings.driver import CUcontext, CUresult

from dask_devctx import Device, devices, driver, on_device
from dask_devctx.cuda.context import Context
from dask_devctx.cuda.scope import Restored, open_scopes
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DeviceScopeError, DriverError
from tests.conftest import Replacing
from tests.python import python

FAILED = CUresult.CUDA_ERROR_UNKNOWN


def current():
    """What the driver itself says is current on this thread."""
    return driver.backend().current_context()


def on_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@pytest.fixture
def calls(machine):
    return driver.backend().driver()


@pytest.fixture
def device(backend):
    return Device(0)


@pytest.fixture
def last(backend):
    """The last device: another than the first one, where there are several."""
    return devices()[-1]


# -- basic, and what a scope is


def test_basic(device):
    with device as entered:
        assert entered is device
        assert Device.current() is device
        assert current() == device.primary_context.handle
        assert open_scopes() == (device,)
    assert current() == 0


# -- what is remembered is what the driver said


def test_none_is_restored_as_none_and_not_as_the_first_device(backend, last):
    with last:
        pass
    assert current() == 0
    if last.device_id:
        assert backend.calls.primary_state(0) == (0, False)


def test_pushed_and_popped_inside(backend, device, last):
    raw = backend.driver().driver
    context = CUcontext(last.primary_context.handle)
    with device:
        raw.cuCtxPushCurrent(context)
        with device:
            raw.cuCtxPushCurrent(context)
            raw.cuCtxPopCurrent()
            assert Device.current() is device
        assert Device.current() is last
        raw.cuCtxPopCurrent()
        assert Device.current() is device
    assert current() == 0


def test_pushed_before_is_on_the_stack_afterwards(backend, device, last):
    raw = backend.driver().driver
    first, second = device.primary_context.handle, last.primary_context.handle
    raw.cuCtxPushCurrent(CUcontext(second))
    raw.cuCtxPushCurrent(CUcontext(first))
    with last:
        pass
    assert int(raw.cuCtxPopCurrent()[1]) == first
    with device:
        pass
    assert int(raw.cuCtxPopCurrent()[1]) == second
    assert current() == 0


# -- a context that was destroyed


def test_another_context_at_the_same_address(machine):
    """The driver uses handles again; the number of the context tells the two apart."""
    plain, reused = machine.driver, 0

    def cuCtxGetId(context):
        status, number = plain.cuCtxGetId(context)
        return status, number and number + reused

    def cuGetProcAddress(name, version, flags):
        if name == b"cuCtxGetId" or not hasattr(plain, "cuGetProcAddress"):
            return CUresult.CUDA_ERROR_NOT_FOUND, None, 0  # it is the function above
        return plain.cuGetProcAddress(name, version, flags)

    reusing = Replacing(plain, cuCtxGetId=cuCtxGetId, cuGetProcAddress=cuGetProcAddress)
    with driver.use(Backend(reusing, machine.nvml, machine)) as backend:
        backend.driver().create(0, 0)
        with pytest.raises(DeviceScopeError, match="destroyed in the meantime"), Device(1):
            reused = 1000
        assert current() == 0


# -- calls that fail


def restoring(handle):
    return lambda context: int(context) == handle


@pytest.mark.parametrize(
    "call",
    [
        lambda fn: Device(1).run(fn),
        lambda fn: on_device(1)(fn)(),
        lambda fn: Device(1).primary_context.run(fn),
    ],
)
def test_failing_restore_is_raised(machine, calls, call):
    machine.faults.inject("cuCtxSetCurrent", FAILED, when=restoring(0))
    with pytest.raises(DriverError, match="cuCtxSetCurrent failed with CUDA_ERROR_UNKNOWN"):
        call(int)
    assert open_scopes() == ()  # the entry is dropped after the restore was tried
    own = Context(0)
    own.set_current()
    with pytest.raises(DeviceScopeError, match="which was destroyed in the meantime"):
        call(own.close)
    assert current() == 0


def test_failing_restore_is_a_note_on_the_bodys_own_exception(machine, calls, caplog):
    machine.faults.inject("cuCtxSetCurrent", FAILED, when=restoring(0))
    with (
        caplog.at_level(logging.WARNING, logger="dask_devctx.cuda.scope"),
        pytest.raises(ZeroDivisionError) as caught,
        Device(1),
    ):
        1 / 0  # noqa: B018
    (note,) = caught.value.__notes__
    assert note.startswith("While leaving the device scope: DriverError: cuCtxSetCurrent failed")
    assert "cuCtxSetCurrent failed" in caplog.text
    assert open_scopes() == ()
    calls.set_current(0)


# No exception comes out of a C function: where scopes call by address, nothing interrupts them.
in_python = pytest.mark.parametrize("simulation", ["simulated"], indirect=True)


@in_python
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("enters", [True, False])
def test_interrupted_enter_is_undone_and_interrupted_exit_restores(machine, moment, enters):
    """The user presses Ctrl-C during the driver's call."""
    at = None

    def cuCtxSetCurrent(context):
        nonlocal at
        now, at = at, None
        if now == "before":
            raise KeyboardInterrupt
        result = machine.driver.cuCtxSetCurrent(context)
        if now == "after":
            raise KeyboardInterrupt
        return result

    interrupted = Replacing(machine.driver, cuCtxSetCurrent=cuCtxSetCurrent)
    with driver.use(Backend(interrupted, machine.nvml, machine)):
        with Device(2):
            outer = current()
            at = moment if enters else None
            with pytest.raises(KeyboardInterrupt), Device(1):  # noqa: PT012
                assert not enters
                at = moment
            assert current() == outer
            assert open_scopes() == (Device(2),)
        assert current() == 0


# -- out of order


def test_scopes_around_await_that_interleave(machine):
    async def work(number, events):
        with Device(number):
            events[number].set()
            await events[3 - number].wait()
            await asyncio.sleep(0.01 * number)

    async def main():
        events = [asyncio.Event() for _ in range(4)]
        return await asyncio.gather(work(1, events), work(2, events), return_exceptions=True)

    outcomes = asyncio.run(main())
    assert [type(outcome) for outcome in outcomes] == [DeviceScopeError, type(None)]
    assert current() == 0


# -- fork


def test_a_context_has_no_copy(machine):
    for context in (own := Context(1), Device(1).primary_context):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled: a context has one"):
                make(context)
    own.close()


def test_forked_while_another_thread_works_on_a_device(child):
    """The child has no such thread: what it held must not be waited for."""

    def fork():
        from cuda.bindings.driver import CUresult

        from dask_devctx import Device, driver
        from dask_devctx.driver.simulated import SimulatedMachine
        from dask_devctx.errors import DriverUnavailableError

        machine = SimulatedMachine(4)
        inside, forked = threading.Event(), threading.Event()

        def slow(*args):
            inside.set()
            assert os.getpid() != parent or forked.wait(30)
            return False

        parent = os.getpid()
        with driver.use(machine.backend()):
            with Device(0):
                pass
            machine.faults.inject("cuDevicePrimaryCtxRetain", CUresult.CUDA_SUCCESS, when=slow)
            thread = threading.Thread(target=Device(1).run, args=(int,))
            thread.start()
            assert inside.wait(30)
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                try:
                    with Device("cuda:3"):
                        pass
                except DriverUnavailableError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
            forked.set()
            thread.join()
            with Device(1) as device:
                assert Device.current() is device

    child(fork)


def test_forked_on_both_drivers(kind, child):
    def fork(kind):
        os.environ.pop("DASK_DEVCTX__SIMULATED_DEVICES", None)
        if kind == "simulated":
            os.environ["DASK_DEVCTX__SIMULATED_DEVICES"] = "2"
        from dask_devctx import Device
        from dask_devctx.errors import DriverUnavailableError

        with Device(0):
            pid = os.fork()
            if pid == 0:
                for use in (Device(0).__enter__, Device(0).sync, Device.current):
                    try:
                        use()
                        os._exit(1)
                    except DriverUnavailableError as error:
                        if "'spawn' or 'forkserver'" not in str(error):
                            os._exit(2)
                os._exit(Device(0).device_id)  # what needs no driver still works
            assert os.waitpid(pid, 0)[1] == 0
            assert Device.current() is Device(0)

    child(fork, kind)


def test_a_scope_without_a_device_starts_no_driver() -> None:
    """A worker without GPUs runs coroutines in it."""
    program = (
        "from dask_devctx import driver\n"
        "from dask_devctx.cuda.scope import Restored\n"
        "with Restored(empty=True): pass\n"
        "assert driver.current_backend() is None"
    )
    python("-c", program)


@pytest.mark.parametrize("scope", [Restored, partial(Restored, empty=True)])
def test_what_was_current_before_is_current_again_after_it(machine: object, scope: type) -> None:
    with Device(1), scope():
        Device(2).set_current()
    with pytest.raises(ValueError, match="the body's own"), Device(1), scope():
        raise ValueError("the body's own")
    assert current() == 0
    with scope():
        Device(2).set_current()
    assert current() == 0


@pytest.mark.parametrize("scope", [Restored, partial(Restored, empty=True)])
def test_a_context_that_was_destroyed_meanwhile_is_not_made_current(
    machine: object, scope: type
) -> None:
    """A process with a real driver would die."""
    context = Context(Device(1))
    context.set_current()
    with pytest.raises(DeviceScopeError, match="destroyed in the meantime"), scope():
        on_thread(context.close)
    assert current() == 0


def test_nothing_is_current_over_a_context_that_is_gone_already(calls):
    handle = calls.create(1, 0)
    on_thread(lambda: calls.destroy(handle))
    with Restored(empty=True):
        assert current() == 0
    assert current() == 0
