"""Calls that do not spoil the graph which another thread captures: looks at a device's work."""

from __future__ import annotations

from array import array
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final

from dask_devctx.driver import statuses
from dask_devctx.errors import DriverError

try:
    from dask_devctx.driver._scope import invoke_relaxed, wait_relaxed
except ImportError:  # it was not built
    invoke_relaxed = wait_relaxed = None  # type: ignore[assignment]

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
# The C functions of a look.
_FUNCTIONS: Final = (
    *(_EXCHANGE, "cuMemFree", "cuCtxSetCurrent", "cuEventQuery", "cuEventRecord"),
    *("cuStreamIsCapturing", "cuStreamQuery"),
)


class Look:
    """Looks at the progress and the health of a device, which wait for nothing."""

    # A worker looks before and after each task. With addresses, the extension makes the calls and
    # keeps the GIL; the bindings release it around each call. On a device that failed, all fail. A
    # record fails for other reasons too, which are no errors of the look.

    def __init__(self, calls: WorkCalls, checked: Checked) -> None:
        self._calls = calls
        self._checked = checked
        self._answer = array("i", [0])  # the legacy stream itself is never captured

    @cached_property
    def _addresses(self) -> dict[str, int]:
        """The functions' addresses by name; empty where one of them is not told."""
        found = {name: self._checked.address(name) for name in _FUNCTIONS}
        return found if invoke_relaxed is not None and all(found.values()) else {}

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

    def __call__(self, context: int = 0) -> None:
        """Raise the error of an earlier kernel; a context that is given is current afterwards."""
        by = self._addresses
        if not by:
            if context:
                self._calls.driver.cuCtxSetCurrent(context)
            self._calls.free(0)  # it frees nothing
            return
        current = (by["cuCtxSetCurrent"], context, 0) if context else ()
        if failed := invoke_relaxed(by[_EXCHANGE], *current, by["cuMemFree"], 0, 0):
            raise self._checked.error(*self._named(failed))

    def reached(self, event: int) -> bool:
        """Return whether the work before an event is done; it need not have been recorded."""
        by = self._addresses
        if by:
            failed = invoke_relaxed(by[_EXCHANGE], by["cuEventQuery"], event, 0)
            if failed is None or failed[1] == statuses.NOT_READY:
                return failed is None
            status = self._named(failed)[1]
        else:
            with RelaxedCapture(self._calls):
                (status,) = self._calls.driver.cuEventQuery(event)
        if status not in (0, statuses.NOT_READY):
            raise self._checked.error("cuEventQuery", status)
        return bool(status == 0)

    def is_legacy_idle(self) -> bool:
        """Return whether the legacy stream is idle: launches into unused ones do not wait then."""
        by = self._addresses
        return bool(by) and invoke_relaxed(by[_EXCHANGE], *self._idle) is None

    def record_legacy(self, event: int) -> bool:
        """Record an event in the legacy stream; False where that would spoil a capture."""
        by = self._addresses
        if not by:
            return self._calls.event_record_unless_captured(event, LEGACY_STREAM)
        failed = self._recorded(by["cuEventRecord"], event, LEGACY_STREAM)
        if failed is not None and failed[1] != statuses.CAPTURE_IMPLICIT:
            raise self._checked.error(*self._named(failed))
        return failed is None

    def _recorded(self, *record: int, current: tuple[int, ...] = ()) -> tuple[int, int] | None:
        """Make a call that records, unless a capture forbids it; return what failed, or None."""
        # A stream has room for about a thousand launches. While the legacy stream is full, a record
        # waits, and must not keep the GIL. To release it for each one makes most tasks wait for it.
        exchange = self._addresses[_EXCHANGE]
        failed = invoke_relaxed(exchange, *current, *self._idle, *record)
        if failed is not None and failed[1] == statuses.NOT_READY:
            failed = wait_relaxed(exchange, *current, *self._idle[:3], *record)  # not its query
        return failed

    def record(self, event: int, context: int) -> bool:
        """Make a context current, and record all its work in an event unless a capture forbids."""
        by = self._addresses
        if by and (record := self._checked.address("cuCtxRecordEvent")):
            current = by["cuCtxSetCurrent"], context, 0
            return self._recorded(record, context, event, current=current) is None
        # A driver that is older than CUDA 12.5 lacks the function.
        with RelaxedCapture(self._calls), suppress(DriverError, AttributeError, RuntimeError):
            self._calls.driver.cuCtxSetCurrent(context)
            if not self._calls.is_capturing(LEGACY_STREAM):
                return bool(self._calls.driver.cuCtxRecordEvent(context, event)[0] == 0)
        return False
