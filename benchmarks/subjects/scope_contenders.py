"""The contenders that switch devices, each in the words of its library."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from benchmarks.case import Missing, Role
from benchmarks.subjects import scope_floor
from dask_devctx import Device, driver
from dask_devctx.driver.calls import Calls

Loop = Callable[[int], float]


@dataclass(frozen=True)
class Way:
    """One way to switch to a device and back.

    Parameters
    ----------
    again, anew
        A loop over one object that is made before, and a loop that makes an object each time; None
        where the library cannot do that. Both return seconds.
    calls, handles
        The driver on which it switches, and that driver's primary contexts by ordinal.
    switches
        Whether it makes another context current at all.
    """

    name: str
    again: Loop | None
    anew: Loop | None
    calls: Calls
    handles: dict[int, int]
    role: Role = "peer"
    switches: bool = True
    remark: str = ""

    def loop(self, made_each_time: bool) -> Loop | None:
        return self.anew if made_each_time else self.again

    def current(self) -> int:
        return self.calls.current()

    def make_current(self, number: int | None) -> None:
        self.calls.set_current(0)
        while self.calls.current():  # contexts that a library pushed
            self.calls.set_current(0)
        if number is not None:
            self.calls.set_current(self.handles[number])


@dataclass
class _Found:
    device_id: int
    calls: Calls
    handles: dict[int, int]
    ways: list[Way] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def add(self, name: str, again: Loop | None, anew: Loop | None, **options: Any) -> None:
        options = {"calls": self.calls, "handles": self.handles} | options
        self.ways.append(Way(name, again, anew, **options))

    def objects(self, name: str, make: Callable[[], Any], **options: Any) -> None:
        self.add(name, over(make()), making(make), **options)


def over(scope: AbstractContextManager[Any]) -> Loop:
    """Return a loop over one object."""

    def loop(count: int) -> float:
        turns = range(count)
        started = time.perf_counter()
        for _ in turns:
            with scope:
                pass
        return time.perf_counter() - started

    return loop


def making(make: Callable[[], AbstractContextManager[Any]]) -> Loop:
    """Return a loop that makes an object for each repetition."""

    def loop(count: int) -> float:
        turns = range(count)
        started = time.perf_counter()
        for _ in turns:
            with make():
                pass
        return time.perf_counter() - started

    return loop


def ways(target: Device, bound: Sequence[Device]) -> tuple[list[Way], list[Missing]]:
    """Return all ways that can run here, and those that cannot."""
    calls = driver.backend().driver()
    handles = {gpu.device_id: gpu.primary_context.handle for gpu in bound}
    found = _Found(target.device_id, calls, handles)
    _ours(found, target, bound)
    simulated = driver.backend().simulated
    for name, peer in {
        "CuPy": _cupy,
        "torch": _torch,
        "Numba": _numba,
        "JAX": _jax,
        "dask-cuda's pattern": _runtime_pattern,
    }.items():
        if simulated:
            found.missing.append(Missing(name, "it needs real GPUs, and these are simulated"))
            continue
        try:
            peer(found)
        except ImportError as error:
            found.missing.append(Missing(name, f"not installed: {error}"))
        except Exception as error:  # a peer with a broken installation must not end the run
            found.missing.append(Missing(name, f"does not work here: {error!r}"))
    _bindings(found)
    _floor(found)
    return found.ways, found.missing


# -- ours


def _ours(found: _Found, target: Device, bound: Sequence[Device]) -> None:
    number = found.device_id
    native = driver.backend().native
    found.objects(
        "dask_devctx" if native is not None else "dask_devctx, in Python",
        lambda: Device(number),
        role="ours",
    )
    if native is None:
        built = find_spec("dask_devctx.driver._scope") is not None
        reason = "the driver does not tell its addresses" if built else "the extension is not built"
        found.missing.append(Missing("dask_devctx, in C", reason))
        return
    with _without_extension() as package:
        copies = {gpu.device_id: package.Device(gpu.device_id) for gpu in bound}
        for copy in copies.values():
            with copy:
                pass
        backend = copies[number]._backend
        found.add(
            "dask_devctx, in Python",
            over(copies[number]),
            None,
            role="variant",
            calls=backend.calls,
            handles={ordinal: copy._handle for ordinal, copy in copies.items()},
            remark="as without a compiler",
        )


@contextlib.contextmanager
def _without_extension() -> Iterator[ModuleType]:
    """Import a second copy of the package, which does not find the extension."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "dask_devctx"]

    before = {name: sys.modules.pop(name) for name in ours()}
    sys.modules["dask_devctx.driver._scope"] = None  # type: ignore[assignment]
    try:
        yield importlib.import_module("dask_devctx")
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


# -- peers


def _cupy(found: _Found) -> None:
    import cupy

    number = found.device_id
    found.objects("CuPy", lambda: cupy.cuda.Device(number), remark="cupy.cuda.Device(n)")


def _torch(found: _Found) -> None:
    import torch

    number = found.device_id
    if not torch.cuda.is_available():
        raise RuntimeError("this torch sees no GPU")
    torch.cuda.init()
    found.objects("torch", lambda: torch.cuda.device(number), remark="torch.cuda.device(n)")


def _numba(found: _Found) -> None:
    from numba import cuda

    number = found.device_id
    found.objects("Numba", lambda: cuda.gpus[number], remark="numba.cuda.gpus[n]")


def _jax(found: _Found) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the others some memory
    import jax

    device = jax.local_devices(backend="gpu")[found.device_id]
    anew = making(lambda: jax.default_device(device))
    found.add(
        "JAX",
        anew,
        anew,
        switches=False,
        remark="jax.default_device(d), made each time; switches no context",
    )


def _runtime_pattern(found: _Found) -> None:
    """The usual workaround with the runtime's own notion of a device, in our own code."""
    from cuda.bindings import runtime

    class Pattern:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> Any:
            _, self.previous = runtime.cudaGetDevice()
            runtime.cudaSetDevice(self.number)
            return self

        def __exit__(self, *exc: object) -> None:
            runtime.cudaSetDevice(self.previous)

    number = found.device_id
    found.objects(
        "dask-cuda's pattern", lambda: Pattern(number), remark="cudaGetDevice, cudaSetDevice"
    )


def _bindings(found: _Found) -> None:
    """The three calls alone: no object, no check of a status."""
    functions = found.calls.driver
    context = found.calls.types.CUcontext(found.handles[found.device_id])

    def loop(count: int) -> float:
        get, make = functions.cuCtxGetCurrent, functions.cuCtxSetCurrent
        turns = range(count)
        started = time.perf_counter()
        for _ in turns:
            _, previous = get()
            make(context)
            make(previous)
        return time.perf_counter() - started

    found.add("cuda.bindings", loop, None, remark="three calls, nothing checked")


def _floor(found: _Found) -> None:
    try:
        loop = scope_floor.loop(found.calls, found.handles[found.device_id])
    except scope_floor.CannotCompileError as error:
        found.missing.append(Missing("the three calls in C", str(error)))
        return
    found.add("the three calls in C", loop, None, role="floor", remark="no Python")
