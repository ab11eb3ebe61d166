"""Calls that do not spoil the graph which another thread captures: looks at a device's work."""

from __future__ import annotations

from array import array
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final

from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError

try:
    from dask_devctx.driver._scope import invoke_relaxed
except ImportError:  # it was not built
    invoke_relaxed = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from dask_devctx.driver.checked import Checked
    from dask_devctx.driver.work import WorkCalls

# CUDA's handles of the streams that always exist.
LEGACY_STREAM: Final = 1
PER_THREAD_STREAM: Final = 2

# `CUstreamCaptureMode`: a thread's calls do not spoil the graphs that other threads capture.
_RELAXED_CAPTURE: Final = 2


class RelaxedCapture:
    """A ``with`` block in which this thread's calls do not spoil another thread's graph capture."""

    __slots__ = ("_before", "_calls")

    def __init__(self, calls: WorkCalls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._before = self._calls.exchange_capture_mode(_RELAXED_CAPTURE)

    def __exit__(self, *error: object) -> None:
        self._calls.exchange_capture_mode(self._before)


_EXCHANGE: Final = "cuThreadExchangeStreamCaptureMode"
# The C functions of a look, with the version of CUDA that introduced the signature used here.
_FUNCTIONS: Final = {
    _EXCHANGE: 10010,
    "cuMemFree": 3020,
    "cuEventQuery": 2000,
    "cuEventRecord": 2000,
    "cuStreamIsCapturing": 10000,
    "cuStreamQuery": 2000,
}


class Look:
    """A look at the progress and the health of the current device, which waits for nothing."""

    # A worker looks before and after each task. With addresses, the extension makes the calls and
    # keeps the GIL; the bindings release it around each call.

    def __init__(self, calls: WorkCalls, checked: Checked) -> None:
        self._calls = calls
        self._checked = checked
        self._answer = array("i", [0])  # the legacy stream itself is never captured

    @cached_property
    def _addresses(self) -> dict[str, int]:
        """The functions' addresses by name; empty where one of them is not told."""
        address = self._checked.address
        found = {name: address(name, version) or 0 for name, version in _FUNCTIONS.items()}
        if invoke_relaxed is None or not all(found.values()):
            return {}
        return found | {"cuCtxRecordEvent": address("cuCtxRecordEvent", 12050) or 0}

    @cached_property
    def _idle(self) -> tuple[int, ...]:
        """The calls that succeed where the legacy stream is idle and forbidden by no capture."""
        # While a stream for which it waits is captured, the second one would spoil the graph.
        by, answer = self._addresses, self._answer.buffer_info()[0]
        capturing = by["cuStreamIsCapturing"], LEGACY_STREAM, answer
        return *capturing, by["cuStreamQuery"], LEGACY_STREAM, 0

    def _named(self, failed: tuple[int, int]) -> tuple[str, int]:
        """Return the name of the function that failed, by its address, and its status."""
        name = next(name for name, known in self._addresses.items() if known == failed[0])
        if name == _EXCHANGE:
            raise self._checked.error(name, failed[1])
        return name, failed[1]

    def __call__(
        self, event: int = 0, context: int = 0, *, query: bool = False, record: bool = False
    ) -> tuple[bool, bool]:
        """Raise if the device failed; return whether the event was reached, and was recorded."""
        # An event that is queried and not reached is not recorded again. On a device that failed
        # both calls fail. A record fails for other reasons too, which are no errors of the look.
        reached = query and self.reached(event)
        wanted = record and (reached or not query)
        recorded = wanted and self._record(event, context)
        if not (recorded if wanted else query):
            self._probe()
        return reached, recorded

    def _probe(self) -> None:
        by = self._addresses
        if not by:
            self._calls.free(0)  # it frees nothing, and raises the error of an earlier kernel
        elif failed := invoke_relaxed(by[_EXCHANGE], by["cuMemFree"], 0, 0):
            raise self._checked.error(*self._named(failed))

    def reached(self, event: int) -> bool:
        """Return whether the work before an event is done; it need not have been recorded."""
        by = self._addresses
        if by:
            failed = invoke_relaxed(by[_EXCHANGE], by["cuEventQuery"], event, 0)
            if failed is None:
                return True
            status = self._named(failed)[1]
        else:
            with RelaxedCapture(self._calls):
                (status,) = self._calls.driver.cuEventQuery(event)
        if status not in (0, statuses.NOT_READY):
            raise self._checked.error("cuEventQuery", status)
        return bool(status == 0)

    def is_legacy_idle(self) -> bool:
        """Return whether the legacy default stream is idle; False where it cannot be asked.

        Then a few launches into streams that no library uses cannot wait.
        """
        by = self._addresses
        return bool(by) and invoke_relaxed(by[_EXCHANGE], *self._idle) is None

    def record_if_idle(self, event: int) -> bool:
        """Record an event in the legacy stream if that is idle; return whether it did."""
        by = self._addresses
        if not by:
            return False
        record = by["cuEventRecord"], event, LEGACY_STREAM
        return invoke_relaxed(by[_EXCHANGE], *self._idle, *record) is None

    def _record(self, event: int, context: int) -> bool:
        """Record all work of a context in an event, unless that would spoil a capture."""
        # A stream has room for about a thousand launches. While the legacy stream is full, the
        # record waits, and by its address it would keep the GIL.
        by = self._addresses
        if by and (record := by["cuCtxRecordEvent"]):
            failed = invoke_relaxed(by[_EXCHANGE], *self._idle, record, context, event)
            if failed is None:
                return True
            if self._named(failed)[0] != "cuStreamQuery":
                return False
        # A driver that is older than CUDA 12.5 lacks the function.
        with RelaxedCapture(self._calls), suppress(DriverError, AttributeError, RuntimeError):
            if not self._calls.is_capturing(LEGACY_STREAM):
                return bool(self._calls.driver.cuCtxRecordEvent(context, event)[0] == 0)
        return False
