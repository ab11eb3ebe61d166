"""Scopes where something ends: generators, objects, threads, other interpreters, the process."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cuda.bindings import driver as types
from cuda.bindings.driver import CUresult

from dask_devctx import Context, Device, driver
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.errors import DriverError


def inside(device, log):
    """A generator with a scope around its ``yield``; it writes down how it was left."""
    try:
        with device:
            yield Device.current()
    except BaseException as error:
        log.append([error.__class__, *getattr(error, "__notes__", ())])
        raise


# -- generators with a scope around a yield


def test_a_generator_that_is_dropped_on_another_thread_changes_nothing(machine):
    log = []
    kept = [inside(Device(1), log)]
    next(kept[0])

    def drop():
        with Device(3):
            kept.clear()
            gc.collect()
            assert Device.current() is Device(3)

    thread = threading.Thread(target=drop, name="collector")
    thread.start()
    thread.join()
    ((kind, note),) = log
    assert kind is GeneratorExit
    assert "on the thread 'collector', which did not enter it" in note
    assert open_scopes() == (Device(1),)
    assert Device.current() is Device(1)
    Device(1).__exit__(None, None, None)
    assert Device.current() is None


def test_scopes_of_one_device_that_interleave_end_as_they_began(machine):
    """They cannot be told apart, and need not be: what was current before both is current after."""
    Device(2).set_current()
    first, second = inside(Device(1), []), inside(Device(1), [])
    next(first), next(second)
    first.close()
    assert Device.current() is Device(1)  # for the second one, which is still open
    second.close()
    assert Device.current() is Device(2)
    driver.backend().calls.set_current(0)


# -- objects


def test_the_entry_is_dropped_only_after_the_restore_was_tried(machine):
    seen = []
    with Device(2):
        outer = driver.backend().current_context()

        def look(context):
            if int(context) == outer:
                seen.append(open_scopes())
            return False

        machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN, when=look)
        with Device(1):
            assert seen == []
        assert seen == [(Device(2), Device(1))]
        assert open_scopes() == (Device(2),)
    assert len(seen) == 1


# -- set_current, which has no end


@pytest.mark.parametrize("unset", [Device.unset_current, Context.unset_current])
def test_unset_current_leaves_nothing_current(backend, unset):
    unset()  # before anything has used CUDA
    assert not backend.initialised
    Device(0).set_current()
    unset()
    assert backend.current_context() == 0
    assert Device.current() is None
    unset()  # where nothing is current
    calls = backend.driver()
    calls.set_current(calls.primary_retain(0))  # another library did
    unset()
    assert backend.current_context() == 0
    calls.primary_release(0)
    own = Context(0)
    own.set_current()
    unset()
    assert backend.current_context() == 0
    assert own.handle
    own.set_current()  # it lives
    unset()
    own.close()


def test_unset_current_takes_off_what_others_pushed(backend):
    """All of it: a pop of theirs finds the stack empty."""
    theirs = Context(0)
    Device(0).set_current()
    for _ in range(2):
        backend.calls.driver.cuCtxPushCurrent(types.CUcontext(theirs.handle))
    Device.unset_current()
    assert backend.current_context() == 0
    status = backend.calls.driver.cuCtxPopCurrent()[0]
    assert status == CUresult.CUDA_ERROR_INVALID_CONTEXT
    theirs.close()


def test_unset_current_that_the_driver_refuses(machine):
    Device(1).set_current()
    machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN)
    with pytest.raises(DriverError, match="cuCtxSetCurrent failed with CUDA_ERROR_UNKNOWN"):
        Device.unset_current()
    assert Device.current() is Device(1)
    Device.unset_current()


# -- the process

_AT_EXIT = """
import atexit, builtins, sys, threading, time
if {without_extension}:
    sys.modules["dask_devctx.driver._scope"] = None
from dask_devctx import Context, Device, driver
if not {without_extension}:
    from dask_devctx.driver.simulated import SimulatedMachine
    from tests.addressed import addressed
    machine = driver.use(addressed(SimulatedMachine(4)))
    machine.__enter__()

def work():
    while True:
        with Device(1), Device(2):
            time.sleep(0)

def hold():
    with Device(1):
        while True:
            time.sleep(0.001)

for target in (work, work, hold):
    threading.Thread(target=target, daemon=True).start()

class AtTheEnd:
    def __del__(self, Device=Device, print=print):
        with Device(3) as device:
            print("del", Device.current() is device)

@atexit.register
def leave():
    with Device(2) as device:
        print("atexit", Device.current() is device)

unclosed = Context(1)
builtins.kept = AtTheEnd()
time.sleep(0.05)
Device(0).__enter__()
"""


def test_set_current_inside_a_scope_ends_with_it(machine):
    with Device(1):
        Device(2).set_current()
        assert Device.current() is Device(2)
    assert Device.current() is None


@pytest.mark.parametrize("options", [("-X", "dev", "-W", "error"), ("-O",)], ids=" ".join)
@pytest.mark.parametrize("without_extension", [False, True])
def test_the_interpreter_ends_with_scopes_open(without_extension, options):
    if not without_extension:
        pytest.importorskip(
            "dask_devctx.driver._scope", reason="the extension _scope was not built"
        )
    done = subprocess.run(
        [sys.executable, *options, "-c", _AT_EXIT.format(without_extension=without_extension)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:2] == ["atexit True", "del True"]


# -- other interpreters

_IN_ANOTHER = """
from dask_devctx import Device, DriverUnavailableError
from dask_devctx.cuda.scope import open_scopes
assert open_scopes() == ()
try:
    with Device(1):
        assert Device.current() is Device(1)
    print("works")
except DriverUnavailableError as error:
    print(error)
assert open_scopes() == ()
"""


def test_a_subinterpreter_works_or_says_why_not(child):
    """Whether it works is up to cuda-bindings; the main interpreter's scope is untouched."""
    names = ["_interpreters", "_xxsubinterpreters"]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        break
    else:
        pytest.skip(f"this Python has none of {names}")

    def use(name, code):
        import importlib

        from dask_devctx import Device

        interpreters = importlib.import_module(name)
        with Device(2) as device:
            for _ in range(2):
                other = interpreters.create()
                assert interpreters.run_string(other, code) is None
                interpreters.destroy(other)
                assert Device.current() is device
        assert Device.current() is None

    done = child(use, name, _IN_ANOTHER)
    for line in done.stdout.splitlines():
        assert line == "works" or "A subinterpreter cannot load cuda-bindings" in line
    assert len(done.stdout.splitlines()) == 2


# -- nothing of the driver before it is needed


@pytest.mark.gpu(count=1)
def test_devices_are_found_without_starting_the_driver(child):
    """On a real machine: NVML is asked, and ``cuInit`` not called, until a scope needs it."""

    def find():
        def started():
            return types.cuDeviceGetCount()[0] != types.CUresult.CUDA_ERROR_NOT_INITIALIZED

        from dask_devctx import Device, devices

        device = Device(0)
        assert device.name
        assert device.memory_info.total
        assert devices()[0] is device
        assert not started()
        with device:
            pass
        assert started()

    child(find, env={"DASK_DEVCTX__SIMULATED_DEVICES": None, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
