"""Faults that are injected into the simulated driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Which calls report a sticky error; those that only say what is current do not.
_REPORT_STICKY = frozenset(
    {
        "cuCtxCreate",
        "cuCtxEnablePeerAccess",
        "cuCtxGetLimit",
        "cuCtxRecordEvent",
        "cuCtxSetLimit",
        "cuCtxSynchronize",
        "cuDevicePrimaryCtxRetain",
        "cuEventCreate",
        "cuEventQuery",
        "cuEventRecord",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemGetInfo",
        "cuStreamWaitEvent",
    }
)


@dataclass
class _Fault:
    function: str
    status: Any
    times: int
    when: Callable[..., bool] | None


class Faults:
    """What goes wrong, and how often each driver function was called.

    Attributes
    ----------
    calls
        How often each driver function was called, by its C name.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._planned: list[_Fault] = []
        self._sticky: Any = None

    def inject(
        self,
        function: str,
        status: Any,
        *,
        times: int = 1,
        when: Callable[..., bool] | None = None,
    ) -> None:
        """Let the next ``times`` calls of a driver function fail.

        Parameters
        ----------
        function
            Its C name.
        status
            The ``CUresult`` that it returns instead.
        when
            Given the call's arguments, whether this call is meant; every call by default.
        """
        self._planned.append(_Fault(function, status, times, when))

    def poison(self, status: Any) -> None:
        """Leave a sticky error: from now on the whole process's work fails with ``status``."""
        self._sticky = status

    def of_call(self, function: str, args: tuple[Any, ...]) -> Any:
        """Return the ``CUresult`` that this call is to fail with, or None."""
        self.calls[function] += 1
        for fault in self._planned:
            if fault.function == function and fault.times and (not fault.when or fault.when(*args)):
                fault.times -= 1
                return fault.status
        return self._sticky if function in _REPORT_STICKY else None
