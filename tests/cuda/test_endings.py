"""Scopes where something ends: generators, objects, threads, other interpreters, the process."""

from __future__ import annotations

import gc
import threading

import pytest
from cuda.bindings import driver as types
from cuda.bindings.driver import CUresult

from dask_devctx import Context, Device
from dask_devctx.cuda.scope import open_scopes
from tests.python import python


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


# -- set_current, which has no end


@pytest.mark.parametrize("unset", [Device.unset_current, Context.unset_current])
def test_unset_current_leaves_nothing_current(backend, unset):
    unset()  # before anything has used CUDA
    assert not backend.initialised
    own, calls = Context(0), backend.driver()

    def pushed():
        """All of it is taken off: a pop of theirs finds the stack empty."""
        for _ in range(2):
            calls.driver.cuCtxPushCurrent(types.CUcontext(own.handle))

    by_another_library = calls.primary_retain(0)
    for make_current in (
        Device(0).set_current,
        own.set_current,
        lambda: calls.set_current(by_another_library),
        pushed,
        lambda: None,
    ):
        make_current()
        unset()
        assert backend.current_context() == 0
        assert Device.current() is None
        assert calls.driver.cuCtxPopCurrent()[0] == CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert own.handle  # it lives
    assert calls.driver.cuDevicePrimaryCtxRelease(0)[0] == 0
    own.close()


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


@pytest.mark.parametrize("options", [("-X", "dev", "-W", "error"), ("-O",)], ids=" ".join)
@pytest.mark.parametrize("without_extension", [False, True])
def test_the_interpreter_ends_with_scopes_open(without_extension, options):
    if not without_extension:
        pytest.importorskip(
            "dask_devctx.driver._scope", reason="the extension _scope was not built"
        )
    done = python(*options, "-c", _AT_EXIT.format(without_extension=without_extension))
    assert done.stderr == ""
    assert done.stdout.split("\n")[:2] == ["atexit True", "del True"]


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
