"""Streams that are captured into graphs, for simulated GPUs.

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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.simulated.faults import OK, UNSAFE_CALLS, Status
from dask_devctx.driver.simulated.gpu import Context

CaptureMode = types.CUstreamCaptureMode
_GLOBAL = CaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
_RELAXED = CaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

# They give work to the legacy stream and wait for it.
_SYNCHRONOUS_COPIES = frozenset(("cuMemcpyDtoH", "cuMemcpyHtoD"))


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
        if function in _SYNCHRONOUS_COPIES:
            status = self.of_legacy_stream(context)
            if status != OK:
                return status
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

    def of_legacy_stream(self, context: Context | None) -> Any:
        """Return the status of a call that uses the legacy stream of a context."""
        captures = self._blocking(context)
        return _spoilt(captures, Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) or OK

    def _blocking(self, context: Context | None) -> list[Capture]:
        streams = (one.stream for one in self._active)
        return [s.capture for s in streams if s.capture and s.blocking and s.context is context]

    def of_stream(self, stream: Stream) -> Any:
        """Return the status of a call that gives work to a stream."""
        if stream.legacy:
            return self.of_legacy_stream(stream.context)
        spoilt = stream.capture is not None and not stream.capture.valid
        return Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if spoilt else OK

    def of_synchronizing(self, stream: Stream) -> Any:
        """Return the status of a wait of the CPU for a stream."""
        refused = _spoilt([stream.capture], Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        return refused or self.of_stream(stream)

    def of_wait(self, stream: Stream, event: Capture | None) -> Any:
        """Return the status of a stream's wait for an event, which a capture may have recorded."""
        status = self.of_stream(stream)
        if status != OK or event is stream.capture:
            return status
        ended = event is not None and event not in self._active
        if stream.capture is not None:
            merges = event is not None and not ended
            return _spoilt(
                [stream.capture, event],
                Status.CUDA_ERROR_STREAM_CAPTURE_MERGE
                if merges
                else Status.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            )
        if ended:
            return Status.CUDA_ERROR_CAPTURED_EVENT
        if event is not None and event.valid:
            raise AttributeError("the simulated driver has no streams that join a capture")
        return Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED

    def begin(self, stream: Stream, mode: Any) -> Any:
        if stream.legacy:
            return Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        if stream.capture is not None:
            return Status.CUDA_ERROR_ILLEGAL_STATE
        stream.capture = Capture(stream, CaptureMode(int(mode)), threading.get_ident())
        self._active.append(stream.capture)
        return OK

    def end(self, stream: Stream) -> Any:
        capture = stream.capture
        if capture is None:
            return Status.CUDA_ERROR_ILLEGAL_STATE
        if capture.mode != _RELAXED and capture.thread != threading.get_ident():
            return Status.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        self.forget(stream)
        return OK if capture.valid else Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED

    def forget(self, stream: Stream) -> None:
        if stream.capture is not None:
            self._active.remove(stream.capture)
            stream.capture = None

    def status(self, stream: Stream, answer: list[Any]) -> Any:
        """Answer ``cuStreamIsCapturing``, which spoils nothing."""
        if stream.legacy and self._blocking(stream.context):
            return Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        capture = stream.capture
        answer.append(types.CUstreamCaptureStatus(0 if capture is None else 2 - capture.valid))
        return OK


def _spoilt(captures: Iterable[Capture | None], status: Any) -> Any:
    """Return the status that these captures cause, which end without a graph; None if none does."""
    found = [capture for capture in captures if capture is not None]
    for capture in found:
        capture.valid = False
    return status if found else None
