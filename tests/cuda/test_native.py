"""The extension, and that nothing but speed tells it from the Python it stands in for."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as types

from dask_devctx import Device, driver
from dask_devctx.cuda.scope import Scope, open_scopes, stack
from dask_devctx.driver import backends
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError
from tests.python import python

native = pytest.importorskip("dask_devctx.driver._scope", reason="the extension was not built")


@pytest.fixture
def simulation() -> str:
    return "addressed"


ILLEGAL = types.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def test_a_scope_makes_three_calls_and_all_of_them_by_address(machine: SimulatedMachine) -> None:
    device = Device(1)
    Device(0).set_current()
    with device:
        pass
    assert isinstance(device._backend.native, native.Native)
    machine.faults.calls.clear()
    reached_python: list[str] = []
    device._backend.calls = _Tell(device._backend.calls, reached_python)  # type: ignore[assignment]
    with device:
        assert len(stack()) == 1
    assert machine.faults.calls == {"cuCtxGetCurrent": 1, "cuCtxSetCurrent": 2}
    assert reached_python == []
    Device.unset_current()


class _Tell:
    """An object's attributes, with a list of those that were asked for."""

    def __init__(self, inner: object, asked: list[str]) -> None:
        self._inner, self._asked = inner, asked

    def __getattr__(self, name: str) -> object:
        self._asked.append(name)
        return getattr(self._inner, name)


def test_short_functions_are_called_by_their_address() -> None:
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def takes_four(*numbers: int | None) -> int:
        seen.append(tuple(number or 0 for number in numbers))
        return 7

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p)
    def adds_to(value: Any, number: int | None) -> int:
        value[0] += number or 0
        return 0

    four, add = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (takes_four, adds_to))
    assert native.invoke(four) == 7
    assert native.invoke(four, 1, 2, 2**64 - 1, 4) == 7
    assert seen == [(0, 0, 0, 0), (1, 2, 2**64 - 1, 4)]
    assert native.invoke_out(add, 40, 2) == (0, 42)
    for wrong in ((), (four, 1, 2, 3, 4, 5), (0,), ("a",), (four, "a")):
        with pytest.raises((TypeError, ValueError)):
            native.invoke(*wrong)
    with pytest.raises(TypeError):
        native.invoke_out(add)


def test_calls_in_relaxed_mode_stop_at_the_first_that_fails() -> None:
    modes, seen = [], []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def exchange(mode: Any) -> int:
        modes.append(mode[0])
        mode[0] = 1
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def short(one: int | None, two: int | None) -> int:
        seen.append((one or 0, two or 0))
        return 7 if one == 2 else 0

    change, call = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (exchange, short))
    assert native.invoke_relaxed(change) is None
    assert native.invoke_relaxed(change, call, 0, 2**64 - 1, call, 1, 5) is None
    assert native.invoke_relaxed(change, call, 3, 0, call, 2, 0, call, 4, 0) == (call, 7)
    assert seen == [(0, 2**64 - 1), (1, 5), (3, 0), (2, 0)]
    assert modes == [2, 1] * 3  # relaxed, and then the mode from before
    too_many = [call, 0, 0] * 5
    for wrong in (
        (),
        (0,),
        (change, call),
        (change, call, 0),
        (change, 0, 0, 0),
        (change, "a", 0, 0),
    ):
        with pytest.raises((TypeError, ValueError)):
            native.invoke_relaxed(*wrong)
    with pytest.raises(TypeError):
        native.invoke_relaxed(change, *too_many)
    pause, turns = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0, 0
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(native.wait_relaxed, change, pause, 300_000, 0)
        while not waiting.done():
            time.sleep(0.01)
            turns += 1
    assert (waiting.result(), turns > 5) == (None, True), "the call kept the GIL"


# Threads, and JAX' own words, of whatever was imported in this process: the child only looks.
@pytest.mark.gpu(count=1)
def test_the_real_driver_tells_its_addresses() -> None:
    with driver.use(backends.real()) as backend:
        device = Device(0)
        with device:
            assert isinstance(backend.native, native.Native)
            assert backend.current_context() == device._handle
            assert device._handle in backend.lasting
        assert backend.current_context() == 0
        assert backend.calls.driver.cuDevicePrimaryCtxRelease(0)[0] == 0


# -- its containers


def test_scopes_may_be_many_deep(machine: SimulatedMachine) -> None:
    with ExitStack() as scopes:
        entered = [scopes.enter_context(Device(number % 4)) for number in range(100)]
        assert open_scopes() == tuple(entered)
    assert Device.current() is None


def test_the_handles_that_last_are_a_set() -> None:
    handles = native.Native(1, 1)  # never called
    assert 0 in handles
    for handle in [*range(100, 0, -1), 2**64 - 1, 5]:
        handles.add(handle)
    assert all(handle in handles for handle in [*range(101), 2**64 - 1])
    assert 101 not in handles
    for wrong in ((0, 1), (1, 0), ("1", 1), (1,)):
        with pytest.raises((TypeError, ValueError)):
            native.Native(*wrong)


# -- what it holds on to


class Probe(Scope):
    """A scope that can be collected, as a Device never is."""

    __slots__ = ("extra",)

    def __init__(self, device: Device) -> None:
        self._backend = device._backend
        self._handle = device.primary_context.handle


def _held(probe: Probe) -> list[int]:
    backend = probe._backend
    return [sys.getrefcount(one) for one in (probe, backend, backend.native, backend.calls)]


def test_scopes_hold_on_to_nothing(machine: SimulatedMachine) -> None:
    probe = Probe(Device(1))
    with probe:
        pass

    gc.collect()
    before, falses = _held(probe), sys.getrefcount(False)
    blocks = sys.getallocatedblocks()
    for _ in range(2000):
        with probe, probe:
            pass
        with pytest.raises(KeyError), probe:
            raise KeyError
        machine.faults.inject("cuCtxSetCurrent", ILLEGAL)
        with pytest.raises(DriverError), probe:
            pass
        machine.faults.clear()
    gc.collect()
    assert _held(probe) == before
    assert abs(sys.getrefcount(False) - falses) < 2000
    assert sys.getallocatedblocks() - blocks < 500
    gone = weakref.ref(probe)
    del probe
    assert gone() is None


def test_a_threads_stack_dies_with_the_thread(machine: SimulatedMachine) -> None:
    device = Device(1)
    references: list[weakref.ref[Probe]] = []

    def leave_it_open() -> None:
        probe = Probe(device)
        references.append(weakref.ref(probe))
        probe.__enter__()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(leave_it_open).result()
    assert references[0]() is None


# -- the same contract without it


@pytest.mark.long
def test_the_tests_of_scopes_pass_without_the_extension() -> None:
    here = Path(__file__).parent
    names = ("scope", "scope_model", "endings", "device", "context", "on_device", "synchronized")
    files = [str(here / f"test_{name}.py") for name in names]
    program = (
        "import sys; sys.modules['dask_devctx.driver._scope'] = None\n"
        "import pytest\n"
        f"code = pytest.main(['-q', '-p', 'no:cacheprovider', *{files!r}, {str(here)!r} + "
        "'/../../dask_devctx/cuda/device.py'])\n"
        "from dask_devctx import Device\n"
        "assert not hasattr(sys.modules['dask_devctx.cuda.scope'].ScopeBase, '__enter__')\n"
        "sys.exit(code)\n"
    )
    python("-c", program, env={driver.SIMULATED_DEVICES_VARIABLE: "4"}, timeout=None)
