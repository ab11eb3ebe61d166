"""Events, streams, and streams that are captured into graphs, for simulated GPUs.

What a stream is given while it is captured is not done: a graph would do it, and simulated devices
have none. The rules are CUDA's: a call that would connect a capture with other work fails, and
spoils the capture. A stream cannot join the capture of another one here.

References
----------
CUDA C++ Programming Guide, "Stream Capture"; ``cuThreadExchangeStreamCaptureMode``;
``cuStreamIsCapturing``; ``cuCtxRecordEvent``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.simulated.contexts import SimulatedContexts
from dask_devctx.driver.simulated.devices import Context, SimulatedGPU
from dask_devctx.driver.simulated.faults import UNSAFE_CALLS, Faults, Refused, Status, function

CaptureMode = types.CUstreamCaptureMode
_GLOBAL = CaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
_RELAXED = CaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

_DEFAULT_STREAMS = (0, 1, 2)
_PER_THREAD_STREAM = 2
# `CUevent_flags`
_DISABLE_TIMING = 2


@dataclass(eq=False)
class Stream:
    """A stream; a ``blocking`` one and the legacy stream of its context wait for each other."""

    context: Context
    blocking: bool
    legacy: bool = False
    capture: Capture | None = None


@dataclass(eq=False)
class Capture:
    """A capture that began on a stream, on a thread."""

    stream: Stream
    mode: Any
    thread: int
    valid: bool = True

    def is_refused_to(self, thread: int, mode: Any) -> bool:
        """Return whether a thread in this mode may make no potentially unsafe call meanwhile."""
        if self.thread == thread:
            return _RELAXED not in (mode, self.mode)
        return (mode, self.mode) == (_GLOBAL, _GLOBAL)


class Captures:
    """The captures of a process that were not ended yet."""

    def __init__(self) -> None:
        self._active: list[Capture] = []

    def check_call(self, function: str, context: Context | None, mode: Any) -> None:
        """Refuse a call that captures forbid."""
        if self._active and function == "cuCtxSynchronize":
            self.check_context(context)
        if self._active and function in UNSAFE_CALLS:
            thread = threading.get_ident()
            _spoil(
                (one for one in self._active if one.is_refused_to(thread, mode)),
                Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            )

    def check_context(self, context: Context | None) -> None:
        """Refuse a call that concerns all streams of a context."""
        captures = (one for one in self._active if one.stream.context is context)
        _spoil(captures, Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def blocking(self, context: Context) -> list[Capture]:
        """Return the captures for whose streams the legacy stream of a context waits."""
        streams = (one.stream for one in self._active)
        return [s.capture for s in streams if s.capture and s.blocking and s.context is context]

    def check_stream(self, stream: Stream) -> None:
        """Refuse a call that gives work to a stream."""
        if stream.legacy:
            captures = self.blocking(stream.context)
            _spoil(captures, Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        elif stream.capture is not None and not stream.capture.valid:
            raise Refused(Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)

    def check_wait(self, stream: Stream, event: Capture | None) -> None:
        """Refuse a stream's wait for an event, which a capture may have recorded."""
        self.check_stream(stream)
        if event is not stream.capture:
            if event is not None:
                raise AttributeError("the simulated driver has no streams that join a capture")
            _spoil([stream.capture], Status.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)

    def add(self, capture: Capture) -> None:
        capture.stream.capture = capture
        self._active.append(capture)

    def forget(self, stream: Stream) -> None:
        if stream.capture is not None:
            self._active.remove(stream.capture)
            stream.capture = None


def _spoil(captures: Iterable[Capture | None], status: Any) -> None:
    """End these captures without a graph, and refuse the call that does it; nothing if none is."""
    found = [capture for capture in captures if capture is not None]
    for capture in found:
        capture.valid = False
    if found:
        raise Refused(status)


class SimulatedStreams(SimulatedContexts):
    """The functions of ``cuda.bindings.driver`` for events and streams."""

    def __init__(self, gpus: Sequence[SimulatedGPU], faults: Faults) -> None:
        super().__init__(gpus, faults)
        self._events: dict[int, Context] = {}
        # When each event that measures time was recorded last, by the event.
        self._reached: dict[int, float | None] = {}
        # By the handle; the default streams by their context, and the thread or None.
        self._streams: dict[int | tuple[int, int | None], Stream] = {}
        self._captures = Captures()
        self._captured: dict[int, Capture] = {}  # by the event that was recorded in it last

    def _end(self, context: Context) -> None:
        super()._end(context)
        for stream in [each for each in self._streams.values() if each.context is context]:
            self._captures.forget(stream)

    def _check(self, function: str) -> None:
        super()._check(function)
        self._captures.check_call(function, self._current(), self._thread.capture_mode)

    # -- events: each is reached as soon as it is recorded

    @function(1, works=True)
    def cuEventCreate(self, flags: int) -> Any:
        context = self._here()
        event = types.CUevent(next(self._handles))
        self._events[int(event)] = context
        if not int(flags) & _DISABLE_TIMING:
            self._reached[int(event)] = None
        return event

    @function(0, works=True)
    def cuEventRecord(self, event: Any, stream: Any) -> Any:
        found = self._stream(stream)
        if not self._events.get(int(event)) is found.context is self._current():
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        self._captures.check_stream(found)
        self._captured.pop(int(event), None)
        if found.capture is not None:
            self._captured[int(event)] = found.capture
        elif int(event) in self._reached:
            self._reached[int(event)] = time.perf_counter()

    @function(0, works=True)
    def cuCtxRecordEvent(self, context: Any, event: Any) -> Any:
        found = self._known(context)
        if self._events.get(int(event)) is not found:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        self._captures.check_context(found)
        self._captured.pop(int(event), None)

    @function(0, works=True, unsafe=True)
    def cuEventQuery(self, event: Any) -> Any:
        if int(event) not in self._events:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        _spoil([self._captured.get(int(event))], Status.CUDA_ERROR_CAPTURED_EVENT)

    @function(1, works=True)
    def cuEventElapsedTime(self, start: Any, end: Any) -> Any:
        first, last = (self._reached.get(int(event)) for event in (start, end))
        if first is None or last is None:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        return 1000 * (last - first)

    @function(0, works=True)
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> Any:
        found = self._stream(stream)
        if int(event) not in self._events:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        self._captures.check_wait(found, self._captured.get(int(event)))

    # -- streams: each has always finished its work

    def _stream(self, handle: Any) -> Stream:
        """Return a stream; the default ones are of the current context."""
        current = self._here()
        stream = self._streams.get(int(handle))
        if int(handle) in _DEFAULT_STREAMS:
            legacy = int(handle) != _PER_THREAD_STREAM
            key = current.id, None if legacy else threading.get_ident()
            stream = self._streams.setdefault(key, Stream(current, True, legacy))
        if stream is None:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        return stream

    @function(1, works=True)
    def cuStreamCreate(self, flags: int) -> Any:
        context = self._here()
        if int(flags) not in (0, 1):
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
        stream = types.CUstream(next(self._handles))
        self._streams[int(stream)] = Stream(context, blocking=int(flags) == 0)
        return stream

    @function(0, works=True)
    def cuStreamDestroy(self, stream: Any) -> Any:
        found = self._streams.get(int(stream))
        if found is not None and found.capture is not None:
            raise AttributeError("the simulated driver destroys no stream that is captured")
        if self._streams.pop(int(stream), None) is None:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)

    @function(0, works=True, unsafe=True)
    def cuStreamSynchronize(self, stream: Any) -> Any:
        found = self._stream(stream)
        _spoil([found.capture], Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        self._captures.check_stream(found)

    def _give(self, stream: Any, work: Callable[[], bool]) -> None:
        """Do a stream's work unless the stream is captured; refuse work that returns False."""
        found = self._stream(stream)
        self._captures.check_stream(found)
        if found.capture is None and not work():
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)

    # -- streams that are captured

    @function(0)
    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> Any:
        found = self._stream(stream)
        if found.legacy:
            raise Refused(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        if found.capture is not None:
            raise Refused(Status.CUDA_ERROR_ILLEGAL_STATE)
        self._captures.add(Capture(found, CaptureMode(int(mode)), threading.get_ident()))

    @function(1)
    def cuStreamEndCapture(self, stream: Any) -> Any:
        found = self._stream(stream)
        capture = found.capture
        if capture is None:
            raise Refused(Status.CUDA_ERROR_ILLEGAL_STATE)
        self._captures.forget(found)
        if not capture.valid:
            raise Refused(Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return types.CUgraph(next(self._handles))

    @function(1)
    def cuStreamIsCapturing(self, stream: Any) -> Any:
        found = self._stream(stream)
        if found.legacy and self._captures.blocking(found.context):  # asking spoils nothing
            raise Refused(Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        number = 0 if found.capture is None else 2 - found.capture.valid
        return types.CUstreamCaptureStatus(number)

    @function(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self._thread.capture_mode = self._thread.capture_mode, CaptureMode(int(mode))
        return before
