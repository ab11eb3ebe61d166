"""Calls that do not spoil the graph which another thread captures: looks at a device's work."""

from __future__ import annotations

from array import array
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

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


class _Addresses(NamedTuple):
    exchange: int
    probe: int
    query: int
    record_event: int
    record: int  # 0 where the driver is too old for it
    capturing: int  # this, and the next: 0 where the driver does not tell them
    idle: int


class Look:
    """A look at the progress and the health of the current device, which waits for nothing."""

    # A worker looks before and after each task: with addresses, one call of the extension.

    def __init__(self, calls: WorkCalls, checked: Checked) -> None:
        self._calls = calls
        self._checked = checked
        self._answer = array("i", [0])  # the legacy stream itself is never captured

    @cached_property
    def _addresses(self) -> _Addresses | None:
        address = self._checked.address
        exchange = address("cuThreadExchangeStreamCaptureMode", 10010)
        probe, query = address("cuMemFree", 3020), address("cuEventQuery", 2000)
        record = address("cuEventRecord", 2000)
        if invoke_relaxed is None or not (exchange and probe and query and record):
            return None
        return _Addresses(
            exchange,
            probe,
            query,
            record,
            record=address("cuCtxRecordEvent", 12050) or 0,
            capturing=address("cuStreamIsCapturing", 10000) or 0,
            idle=address("cuStreamQuery", 2000) or 0,
        )

    def __call__(
        self, event: int = 0, context: int = 0, *, query: bool = False, record: bool = False
    ) -> tuple[bool, bool]:
        """Raise if the device failed; return whether the event was reached, and was recorded."""
        # An event that is queried and not reached is not recorded again. A failing record is no
        # error of the look: probe again to learn whether the device failed meanwhile.
        by = self._addresses
        if by is None:  # each call releases the GIL
            return self._in_python(event, context, query, record)
        # A stream has room for about a thousand launches. While the legacy stream is full, a record
        # of the whole context waits, and by its address it would keep the GIL. While a stream is
        # captured for which the legacy stream waits, a record would spoil the graph.
        refused = self._refused_by_legacy(by) if record else None
        record = record and refused != by.capturing
        at_once = record and refused is None
        reached, recorded = self._by(by, event, context, query, at_once)
        if record and not at_once and (reached or not query):
            with RelaxedCapture(self._calls), suppress(DriverError):
                recorded = self._calls.event_record_context(event, context)
        return reached, recorded

    def is_legacy_idle(self) -> bool:
        """Return whether the legacy default stream is idle; False where it cannot be asked."""
        by = self._addresses
        return by is not None and self._refused_by_legacy(by) is None

    def reached(self, event: int) -> bool | None:
        """Return whether an event was reached; None where its function's address is not told."""
        by = self._addresses
        if by is None:
            return None
        failed = invoke_relaxed(by.exchange, by.query, event, 0)
        if failed is None or failed == (by.query, statuses.NOT_READY):
            return failed is None
        raise self._checked.error("cuEventQuery", failed[1])

    def record_if_idle(self, event: int) -> bool:
        """Record an event in the legacy stream if that is idle; return whether it did."""
        by = self._addresses
        if by is None or not (by.capturing and by.idle):
            return False
        captured = by.capturing, LEGACY_STREAM, self._answer.buffer_info()[0]
        recorded = by.record_event, event, LEGACY_STREAM
        return invoke_relaxed(by.exchange, *captured, by.idle, LEGACY_STREAM, 0, *recorded) is None

    def _refused_by_legacy(self, by: _Addresses) -> int | None:
        """Return None if the legacy stream is idle, or else the call that does not say so."""
        # While a stream for which it waits is captured, the second question would spoil the graph.
        if not (by.capturing and by.idle):
            return -1
        capturing = by.capturing, LEGACY_STREAM, self._answer.buffer_info()[0]
        failed = invoke_relaxed(by.exchange, *capturing, by.idle, LEGACY_STREAM, 0)
        return None if failed is None else failed[0]

    def _by(
        self, by: _Addresses, event: int, context: int, query: bool, record: bool
    ) -> tuple[bool, bool]:
        wanted = [by.query, event, 0] if query else []
        wanted += [by.probe, 0, 0]
        if record and by.record:
            wanted += [by.record, context, event]
        failed = invoke_relaxed(by.exchange, *wanted)
        if failed is None:
            return query, record and by.record != 0
        address, status = failed
        if address == by.query and status == statuses.NOT_READY:
            self()
            return False, False
        if address == by.record:
            return query, False
        names = {by.query: "cuEventQuery", by.probe: "cuMemFree"}
        raise self._checked.error(names.get(address, "cuThreadExchangeStreamCaptureMode"), status)

    def _in_python(self, event: int, context: int, query: bool, record: bool) -> tuple[bool, bool]:
        calls = self._calls
        with RelaxedCapture(calls):
            reached = query and calls.event_done(event)
            calls.probe()
            recorded = False
            if record and (reached or not query):
                with suppress(DriverError):
                    free = not calls.is_capturing(LEGACY_STREAM)
                    recorded = free and calls.event_record_context(event, context)
        return reached, recorded
