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
from dask_devctx.driver.simulated.faults import OK, UNSAFE_CALLS, Faults, Refused, Status, function

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

    def of_call(self, function: str, context: Context | None, mode: Any) -> Any:
        """Return the status of a call that captures forbid; None where it is allowed."""
        if not self._active:
            return None
        if function == "cuCtxSynchronize" and self.of_context(context) != OK:
            return Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        if function in UNSAFE_CALLS:
            thread = threading.get_ident()
            return _spoilt(
                (one for one in self._active if one.is_refused_to(thread, mode)),
                Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            )
        return None

    def of_context(self, context: Context | None) -> Any:
        """Return the status of a call that concerns all streams of a context."""
        captures = (one for one in self._active if one.stream.context is context)
        return _spoilt(captures, Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) or OK

    def blocking(self, context: Context) -> list[Capture]:
        """Return the captures for whose streams the legacy stream of a context waits."""
        streams = (one.stream for one in self._active)
        return [s.capture for s in streams if s.capture and s.blocking and s.context is context]

    def of_stream(self, stream: Stream) -> Any:
        """Return the status of a call that gives work to a stream."""
        if stream.legacy:
            captures = self.blocking(stream.context)
            return _spoilt(captures, Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) or OK
        spoilt = stream.capture is not None and not stream.capture.valid
        return Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if spoilt else OK

    def of_wait(self, stream: Stream, event: Capture | None) -> Any:
        """Return the status of a stream's wait for an event, which a capture may have recorded."""
        status = self.of_stream(stream)
        if status != OK or event is stream.capture:
            return status
        ended = event is not None and not self.has(event)
        if stream.capture is not None:
            merges = event is not None and not ended
            name = f"CUDA_ERROR_STREAM_CAPTURE_{'MERGE' if merges else 'ISOLATION'}"
            return _spoilt([stream.capture, event], Status.__members__[name])
        if ended:
            return Status.CUDA_ERROR_CAPTURED_EVENT
        if event is not None and event.valid:
            raise AttributeError("the simulated driver has no streams that join a capture")
        return Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED

    def has(self, capture: Capture) -> bool:
        """Return whether a capture goes on."""
        return capture in self._active

    def add(self, capture: Capture) -> None:
        capture.stream.capture = capture
        self._active.append(capture)

    def forget(self, stream: Stream) -> None:
        if stream.capture is not None:
            self._active.remove(stream.capture)
            stream.capture = None


def _spoilt(captures: Iterable[Capture | None], status: Any) -> Any:
    """Return the status that these captures cause, which end without a graph; None if none does."""
    found = [capture for capture in captures if capture is not None]
    for capture in found:
        capture.valid = False
    return status if found else None


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

    def _refused(self, function: str) -> Any:
        mode = self._thread.capture_mode
        return super()._refused(function) or self._captures.of_call(function, self._current(), mode)

    # -- events: each is reached as soon as it is recorded

    @function(1, works=True)
    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        context = self._here()
        event = types.CUevent(next(self._handles))
        self._events[int(event)] = context
        if not int(flags) & _DISABLE_TIMING:
            self._reached[int(event)] = None
        return OK, event

    @function(0)
    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:
        found = self._events.pop(int(event), None)
        self._reached.pop(int(event), None)
        self._captured.pop(int(event), None)
        return (OK if found else Status.CUDA_ERROR_INVALID_HANDLE,)

    @function(0, works=True)
    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        if not self._events.get(int(event)) is found.context is self._current():
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        status = self._captures.of_stream(found)
        if status == OK:
            self._captured.pop(int(event), None)
            if found.capture is not None:
                self._captured[int(event)] = found.capture
            elif int(event) in self._reached:
                self._reached[int(event)] = time.perf_counter()
        return (status,)

    @function(0, works=True)
    def cuCtxRecordEvent(self, context: Any, event: Any) -> tuple[Any, ...]:
        found = self._known(context)
        if self._events.get(int(event)) is not found:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        status = self._captures.of_context(found)
        if status == OK:
            self._captured.pop(int(event), None)
        return (status,)

    @function(0, works=True, unsafe=True)
    def cuEventQuery(self, event: Any) -> tuple[Any, ...]:
        return (self._state(event),)

    @function(0, unsafe=True)
    def cuEventSynchronize(self, event: Any) -> tuple[Any, ...]:
        return (self._state(event),)

    def _state(self, event: Any) -> Any:
        if int(event) not in self._events:
            return Status.CUDA_ERROR_INVALID_HANDLE
        capture = self._captured.get(int(event))
        if capture is None:
            return OK
        if not self._captures.has(capture):
            return Status.CUDA_ERROR_INVALID_VALUE  # not so in the documentation, but on an H100
        capture.valid = False
        return Status.CUDA_ERROR_CAPTURED_EVENT

    @function(1, works=True)
    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[Any, ...]:
        reached = [self._reached.get(int(event)) for event in (start, end)]
        first, last = reached
        if first is None or last is None:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        return OK, 1000 * (last - first)

    @function(0, works=True)
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any, ...]:
        found = self._stream(stream)
        if int(event) not in self._events:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        return (self._captures.of_wait(found, self._captured.get(int(event))),)

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
    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        context = self._here()
        if int(flags) not in (0, 1):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        stream = types.CUstream(next(self._handles))
        self._streams[int(stream)] = Stream(context, blocking=int(flags) == 0)
        return OK, stream

    @function(0, works=True)
    def cuStreamDestroy(self, stream: Any) -> tuple[Any, ...]:
        found = self._streams.get(int(stream))
        if found is not None and found.capture is not None:
            raise AttributeError("the simulated driver destroys no stream that is captured")
        self._streams.pop(int(stream), None)
        return (OK if found else Status.CUDA_ERROR_INVALID_HANDLE,)

    @function(0, works=True, unsafe=True)
    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        refused = _spoilt([found.capture], Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        return (refused or self._captures.of_stream(found),)

    def _given(self, stream: Any, work: Callable[[], bool]) -> tuple[Any, ...]:
        """Do a stream's work at once, or not at all while the stream is captured.

        The work returns False where an argument is wrong.
        """
        found = self._stream(stream)
        status = self._captures.of_stream(found)
        if status != OK or found.capture is not None or work():
            return (status,)
        return (Status.CUDA_ERROR_INVALID_VALUE,)

    # -- streams that are captured

    @function(0)
    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        if found.legacy:
            return (Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        if found.capture is not None:
            return (Status.CUDA_ERROR_ILLEGAL_STATE,)
        self._captures.add(Capture(found, CaptureMode(int(mode)), threading.get_ident()))
        return (OK,)

    @function(1)
    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        capture = found.capture
        if capture is None:
            return (Status.CUDA_ERROR_ILLEGAL_STATE,)
        self._captures.forget(found)  # also on the wrong thread
        if capture.mode != _RELAXED and capture.thread != threading.get_ident():
            return (Status.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,)
        if not capture.valid:
            return (Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,)
        return OK, types.CUgraph(next(self._handles))

    @function(1)
    def cuStreamIsCapturing(self, stream: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        if found.legacy and self._captures.blocking(found.context):  # asking spoils nothing
            return (Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,)
        number = 0 if found.capture is None else 2 - found.capture.valid
        return OK, types.CUstreamCaptureStatus(number)

    @function(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self._thread.capture_mode = self._thread.capture_mode, CaptureMode(int(mode))
        return OK, before
