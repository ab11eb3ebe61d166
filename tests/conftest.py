"""The drivers that tests run on."""

from __future__ import annotations

import inspect
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import dask
import pynvml
import pytest
from hypothesis import HealthCheck, settings

from dask_devctx import driver
from dask_devctx.driver import backends
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.simulated import SimulatedMachine
from tests.addressed import addressed
from tests.python import python

# Imported by the processes of some tests only.
collect_ignore = ["standins"]

# The time that an example takes depends on how busy the machine is.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

# Where the driver tells the addresses of its functions, scopes call them in C.
_IN_C = pytest.param(
    "addressed",
    id="addressed",
    marks=pytest.mark.skipif(
        find_spec("dask_devctx.driver._scope") is None, reason="the extension _scope was not built"
    ),
)
_BACKENDS = [
    pytest.param("simulated", id="simulated"),
    pytest.param("real", id="real", marks=pytest.mark.gpu(count=1)),
]


def no_gpus() -> Backend:
    """The driver of a machine without GPUs."""

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def missing(*_: object) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    nvml = SimpleNamespace(**{**vars(pynvml), "nvmlInit": refuse})
    library: Any = SimpleNamespace(cuInit=missing, cuCtxGetCurrent=missing)
    return Backend(library, nvml)


@pytest.fixture(params=["simulated", _IN_C])
def simulation(request: pytest.FixtureRequest) -> str:
    """``"addressed"`` where the simulated driver tells the addresses of its functions."""
    return str(request.param)


@pytest.fixture
def machine(simulation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedMachine]:
    """Four simulated GPUs, with the same UUIDs in this process and in those that it starts."""
    monkeypatch.setenv(driver.SIMULATED_DEVICES_VARIABLE, "4")
    machine = SimulatedMachine(4)
    with driver.use(addressed(machine) if simulation == "addressed" else machine.backend()):
        yield machine
        handle = machine.driver.cuCtxGetCurrent()[1]
        assert handle is None or int(handle) == 0, "a context was left current"


@pytest.fixture
def validate() -> Iterator[None]:
    """Turn on dask's own checks of its state."""
    settings = {"distributed.worker.validate": True, "distributed.scheduler.validate": True}
    with dask.config.set(settings):
        yield


@pytest.fixture(params=_BACKENDS)
def kind(request: pytest.FixtureRequest) -> str:
    """``"simulated"`` or ``"real"``, for tests that use the driver in a separate process."""
    return str(request.param)


@pytest.fixture(params=[*_BACKENDS, _IN_C])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The package's driver in this test; afterwards no context of the test's is left."""
    machine = SimulatedMachine(4, host="test")
    if request.param == "real":
        used = backends.real()
    else:
        used = addressed(machine) if request.param == "addressed" else machine.backend()
    with driver.use(used):
        yield used
        assert used.current_context() == 0
        for device in used.devices.values():
            if device._handle:
                assert used.calls.driver.cuDevicePrimaryCtxRelease(device._ordinal())[0] == 0


class Replacing:
    """A driver, or NVML, of which some functions are others."""

    def __init__(self, inner: object, **replaced: Callable[..., object]) -> None:
        self._inner = inner
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


Child = Callable[..., subprocess.CompletedProcess[str]]

_PRELUDE = """
import ctypes, os, signal, subprocess, sys, threading
from cuda.bindings import driver as types
def make(kind):
    if kind == "real":
        return types
    from dask_devctx.driver.simulated import SimulatedMachine
    return SimulatedMachine(2, host="test").driver
def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]
def names(*results):
    return [result[0].name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_") for result in results]
def start(function, *arguments):
    call = f"SOURCE = {SOURCE!r}\\nexec(SOURCE)\\n{function.__name__}(*{arguments!r})"
    command = [sys.executable, "-W", "ignore", "-c", call]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
"""


@pytest.fixture
def child() -> Child:
    """Run a function in a fresh process: ``child(function, *arguments, env=…, check=True)``.

    It sees ``make``, ``ok``, ``names``, ``types``, ``beside=`` and ``start(function, *arguments)``.
    """

    def run(
        function: Callable[..., None],
        *arguments: object,
        env: dict[str, str | None] | None = None,
        check: bool = True,
        beside: tuple[Callable[..., object], ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        functions = (*beside, function)
        source = _PRELUDE + "".join(textwrap.dedent(inspect.getsource(f)) for f in functions)
        call = f"{function.__name__}(*{arguments!r})\n"
        program = f"SOURCE = {source!r}\nexec(SOURCE)\n{call}"
        return python("-W", "ignore", "-c", program, env=env, check=check)

    return run
