"""Faults that are injected into the simulated driver."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda.bindings.driver import CUresult

# The calls that need a working device. They report a sticky error; those that only say what is
# current do not.
WORKING_CALLS = frozenset(
    (
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
        "cuIpcCloseMemHandle",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemGetAddressRange",
        "cuMemGetInfo",
        "cuMemcpyAsync",
        "cuMemcpyDtoH",
        "cuMemcpyHtoD",
        "cuMemcpyPeerAsync",
        "cuStreamCreate",
        "cuStreamDestroy",
        "cuStreamSynchronize",
        "cuStreamWaitEvent",
    )
)
# Those of them that wait for what the device was given.
_WAITING_CALLS = ("cuCtxSynchronize", "cuMemcpyDtoH", "cuStreamSynchronize")


@dataclass
class _Fault:
    function: str
    status: Any
    times: int
    when: Callable[..., bool] | None


class Faults:
    """What goes wrong, and how often each driver function was called.

    Parameters
    ----------
    driver
        The class whose functions they are.

    Attributes
    ----------
    calls
        How often each driver function was called, by its C name.
    """

    def __init__(self, driver: type) -> None:
        self._driver = driver
        self.calls: Counter[str] = Counter()
        self._planned: list[_Fault] = []
        self._sticky: Any = None
        self._sticky_at = 0.0

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

        Raises
        ------
        ValueError
            The simulated driver has no such function.
        """
        if not hasattr(self._driver, function):
            known = [name for name in dir(self._driver) if name.startswith("cu")]
            near = difflib.get_close_matches(function, known) or known
            raise ValueError(f"the simulated driver has no {function!r}; it has {', '.join(near)}")
        self._planned.append(_Fault(function, status, times, when))

    def poison(self, status: Any, *, after_s: float = 0.0) -> None:
        """Leave a sticky error: from then on the whole process's work fails with ``status``.

        Parameters
        ----------
        status
            The ``CUresult``.
        after_s
            For so long the kernel that leaves it is still running: events are not reached, and who
            waits for the device waits for it.
        """
        self._sticky_at = time.monotonic() + after_s
        self._sticky = status

    def clear(self) -> None:
        """Let everything work again; how often functions were called is still known."""
        self._planned.clear()
        self._sticky = None

    def of_call(self, function: str, args: tuple[Any, ...]) -> Any:
        """Return the ``CUresult`` that this call is to fail with, or None."""
        self.calls[function] += 1
        for fault in self._planned:
            if fault.function == function and fault.times and (not fault.when or fault.when(*args)):
                fault.times -= 1
                if not fault.times:
                    self._planned.remove(fault)
                return fault.status
        if self._sticky is None or function not in WORKING_CALLS:
            return None
        if function in _WAITING_CALLS:
            time.sleep(max(0.0, self._sticky_at - time.monotonic()))
        if time.monotonic() >= self._sticky_at:
            return self._sticky
        return CUresult.CUDA_ERROR_NOT_READY if function == "cuEventQuery" else None
