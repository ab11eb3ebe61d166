"""Faults that are injected into the simulated driver, and the frame of each of its functions."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as types

Status = types.CUresult

# The calls that need a working device. They report a sticky error; calls that only ask for the
# current context do not.
WORKING_CALLS: set[str] = set()
# The calls whose effect a graph would not repeat. CUDA calls them potentially unsafe.
UNSAFE_CALLS: set[str] = set()
# The calls among them that wait for the device's work.
_WAITING_CALLS = ("cuCtxSynchronize", "cuStreamSynchronize")


class Refused(Exception):  # no error of ours: the driver's answer
    """The status of a driver function that cannot go on."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class _Fault:
    function: str
    status: Any
    times: int
    when: Callable[..., bool] | None


class Faults:
    """Injects faults into driver functions, and counts their calls by the C names."""

    def __init__(self, driver: type) -> None:
        self._driver = driver
        self.calls: Counter[str] = Counter()
        self._planned: list[_Fault] = []
        self._sticky: Any = None
        self._sticky_at = 0.0

    def inject(
        self, function: str, status: Any, *, times: int = 1, when: Callable[..., bool] | None = None
    ) -> None:
        """Make the next ``times`` calls of a driver function, ``when`` of their arguments, fail."""
        getattr(self._driver, function)  # raises for a name that it does not have
        self._planned.append(_Fault(function, status, times, when))

    def poison(self, status: Any, *, after_s: float = 0.0) -> None:
        """Leave a sticky error at the end of a kernel that runs for ``after_s`` seconds."""
        self._sticky_at = time.monotonic() + after_s
        self._sticky = status

    def clear(self) -> None:
        """Let everything work again; the counts of calls stay."""
        self._planned.clear()
        self._sticky = None

    def check(self, function: str, args: tuple[Any, ...]) -> None:
        """Count a call; refuse it if it is to fail."""
        self.calls[function] += 1
        for fault in self._planned:
            if fault.function == function and fault.times and (not fault.when or fault.when(*args)):
                fault.times -= 1
                if not fault.times:
                    self._planned.remove(fault)
                raise Refused(fault.status)
        if self._sticky is None or function not in WORKING_CALLS:
            return
        if function in _WAITING_CALLS:
            time.sleep(max(0.0, self._sticky_at - time.monotonic()))
        if time.monotonic() >= self._sticky_at:
            raise Refused(self._sticky)
        if function == "cuEventQuery":
            raise Refused(Status.CUDA_ERROR_NOT_READY)


def function(
    outputs: int, *, needs_init: bool = True, works: bool = False, unsafe: bool = False
) -> Callable[[Any], Any]:
    """Make a driver function of a method that returns so many values, or raises `Refused`.

    ``works``: the call needs a working device. ``unsafe``: a capture forbids it.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        if works:
            WORKING_CALLS.add(body.__name__)
        if unsafe:
            UNSAFE_CALLS.add(body.__name__)

        @functools.wraps(body)
        def call(self: Any, *args: Any) -> tuple[Any, ...]:
            try:
                self._faults.check(body.__name__, args)
                # The real driver answers so in a process that was forked after cuInit.
                if needs_init and self._pid != os.getpid():
                    raise Refused(Status.CUDA_ERROR_NOT_INITIALIZED)
                self._check(body.__name__)
                found = body(self, *args)
            except Refused as refused:
                return (refused.status, *[None] * outputs)
            return (Status.CUDA_SUCCESS, *(found if outputs > 1 else [found][:outputs]))

        return call

    return decorate
