"""The simulated CUDA driver's events, streams, memory and copies."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.simulated.captures import Capture, CaptureMode, Captures, Stream
from dask_devctx.driver.simulated.contexts import SimulatedContexts
from dask_devctx.driver.simulated.faults import OK, Faults, Status, function
from dask_devctx.driver.simulated.gpu import Context, SimulatedGPU
from dask_devctx.driver.simulated.memory import Block, Handle, Memory

_DEFAULT_STREAMS = (0, 1, 2)
_PER_THREAD_STREAM = 2
_HANDLE_NBYTES = 64
# `CUevent_flags`
_DISABLE_TIMING = 2


class SimulatedDriver(SimulatedContexts):
    """``cuda.bindings.driver`` for simulated GPUs, whose work is done at once."""

    def __init__(self, gpus: Sequence[SimulatedGPU], faults: Faults) -> None:
        super().__init__(gpus, faults)
        self._memory = Memory()
        self._events: dict[int, Context] = {}
        # When each event that measures time was recorded last, by the event.
        self._reached: dict[int, float | None] = {}
        # By the handle; the default streams by their context, and the thread or None.
        self._streams: dict[int | tuple[int, int | None], Stream] = {}
        self._captures = Captures()
        self._captured: dict[int, Capture] = {}  # by the event that was recorded in it last
        self._locked_pages: dict[int, int] = {}  # the number of bytes by the first address

    def _end(self, context: Context) -> None:
        super()._end(context)
        self._memory.end(context)
        for stream in [each for each in self._streams.values() if each.context is context]:
            self._captures.forget(stream)

    def _refused(self, function: str) -> Any:
        mode = self._thread.capture_mode
        return super()._refused(function) or self._captures.of_call(function, self._current(), mode)

    # -- events: each is reached as soon as it is recorded

    @function(1, works=True)
    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        status, context = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
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
        def record(found: Stream) -> Any:
            if not self._events.get(int(event)) is found.context is self._current():
                return Status.CUDA_ERROR_INVALID_HANDLE
            status = self._captures.of_stream(found)
            if status == OK:
                self._captured.pop(int(event), None)
                if found.capture is not None:
                    self._captured[int(event)] = found.capture
                elif int(event) in self._reached:
                    self._reached[int(event)] = time.perf_counter()
            return status

        return (self._on(stream, record),)

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
        def wait(found: Stream) -> Any:
            if int(event) not in self._events:
                return Status.CUDA_ERROR_INVALID_HANDLE
            return self._captures.of_wait(found, self._captured.get(int(event)))

        return (self._on(stream, wait),)

    # -- streams: each has always finished its work

    def _on(self, handle: Any, do: Callable[[Stream], Any]) -> Any:
        """Return the status of what is done on a stream; the default ones are of this context."""
        status, current = self._of_current(lambda ctx: ctx)
        if status != OK:
            return status
        stream = self._streams.get(int(handle))
        if int(handle) in _DEFAULT_STREAMS:
            legacy = int(handle) != _PER_THREAD_STREAM
            key = current.id, None if legacy else threading.get_ident()
            stream = self._streams.setdefault(key, Stream(current, True, legacy))
        return Status.CUDA_ERROR_INVALID_HANDLE if stream is None else do(stream)

    @function(1, works=True)
    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        status, context = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
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
        return (self._on(stream, self._captures.of_synchronizing),)

    def _given(self, stream: Any, work: Callable[[], bool]) -> tuple[Any, ...]:
        """Do a stream's work at once, or not at all while the stream is captured.

        The work returns False where an argument is wrong.
        """

        def give(found: Stream) -> Any:
            status = self._captures.of_stream(found)
            if status != OK or found.capture is not None or work():
                return status
            return Status.CUDA_ERROR_INVALID_VALUE

        return (self._on(stream, give),)

    # -- streams that are captured

    @function(0)
    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        return (self._on(stream, lambda found: self._captures.begin(found, mode)),)

    @function(1)
    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        status = self._on(stream, self._captures.end)
        return (status, types.CUgraph(next(self._handles))) if status == OK else (status,)

    @function(1)
    def cuStreamIsCapturing(self, stream: Any) -> tuple[Any, ...]:
        answer: list[Any] = []
        status = self._on(stream, lambda found: self._captures.status(found, answer))
        return (status, *answer)

    @function(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self._thread.capture_mode = self._thread.capture_mode, CaptureMode(int(mode))
        return OK, before

    # -- memory

    @function(2, works=True)
    def cuMemGetInfo(self) -> tuple[Any, ...]:
        status, gpu = self._of_current(lambda ctx: ctx.gpu)
        if status != OK:
            return (status,)
        return OK, gpu.total_memory - gpu.used_memory, gpu.total_memory

    @function(1, works=True, unsafe=True)
    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        status, context = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
        if nbytes == 0:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        base = self._memory.allocate(context, nbytes)
        if base is None:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY,)
        return OK, types.CUdeviceptr(base)

    @function(0, works=True, unsafe=True)
    def cuMemFree(self, pointer: Any) -> tuple[Any, ...]:
        current = self._current()
        if current is not None and not current.alive:
            return (Status.CUDA_ERROR_CONTEXT_IS_DESTROYED,)
        freed = not int(pointer) or self._memory.free(int(pointer))
        return (OK if freed else Status.CUDA_ERROR_INVALID_VALUE,)

    @function(2, works=True)
    def cuMemGetAddressRange(self, pointer: Any) -> tuple[Any, ...]:
        status, block = self._of_current(lambda ctx: self._memory.find(int(pointer)))
        if status != OK:
            return (status,)
        if block is None:
            return (Status.CUDA_ERROR_NOT_FOUND,)
        return OK, types.CUdeviceptr(block.base), block.nbytes

    def block(self, pointer: int) -> Block | None:
        """Return the allocation with this address; for simulated libraries, not a CUDA function."""
        return self._memory.find(pointer)

    # -- copies, which are done when the call returns

    @function(0, works=True)
    def cuMemcpyAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> tuple[Any, ...]:
        return self._given(stream, lambda: self._copy(target, source, nbytes))

    @function(0, works=True)
    def cuMemcpyPeerAsync(
        self, target: Any, context: Any, source: Any, of: Any, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        for each in (context, of):
            if not int(each):
                return (Status.CUDA_ERROR_INVALID_CONTEXT,)
            status, _ = self._of_context(self._known(each), lambda ctx: None)
            if status != OK:
                return (status,)
        return self._given(stream, lambda: self._copy(target, source, nbytes))

    def _copy(self, target: Any, source: Any, nbytes: int) -> bool:
        return not nbytes or self._memory.copy(int(target), int(source), nbytes)

    @function(0, works=True, unsafe=True)
    def cuMemcpyDtoH(self, host: int, source: Any, nbytes: int) -> tuple[Any, ...]:
        return self._given(0, lambda: self._move(source, nbytes, lambda at: (host, at)))

    @function(0, works=True, unsafe=True)
    def cuMemcpyHtoD(self, target: Any, host: int, nbytes: int) -> tuple[Any, ...]:
        return self._given(0, lambda: self._move(target, nbytes, lambda at: (at, host)))

    @function(0, works=True)
    def cuMemcpyDtoHAsync(
        self, host: int, source: Any, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        return self._given(stream, lambda: self._move(source, nbytes, lambda at: (host, at)))

    @function(0, works=True)
    def cuMemcpyHtoDAsync(
        self, target: Any, host: int, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        return self._given(stream, lambda: self._move(target, nbytes, lambda at: (at, host)))

    def _move(self, pointer: Any, nbytes: int, ends: Callable[[int], tuple[int, int]]) -> bool:
        """Copy between device and host: ``ends`` gives target and source, by host addresses."""
        block = self._memory.find(int(pointer), nbytes)
        if nbytes and block is not None:
            ctypes.memmove(*ends(block.host_address(int(pointer))), nbytes)
        return not nbytes or block is not None

    @function(0, works=True, unsafe=True)
    def cuMemHostRegister(self, host: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        status = self._of_current(lambda ctx: None)[0]
        if status != OK:
            return (status,)
        if not int(host) or not nbytes or flags & ~0xF:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        end = int(host) + nbytes
        for begin, length in self._locked_pages.items():
            if begin < end and int(host) < begin + length:
                return (Status.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self._locked_pages[int(host)] = nbytes
        return (OK,)

    @function(0, works=True, unsafe=True)
    def cuMemHostUnregister(self, host: int) -> tuple[Any, ...]:
        if int(host) not in self._locked_pages:
            return (Status.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
        status = self._of_current(lambda ctx: None)[0]
        if status == OK:
            self._locked_pages.pop(int(host), None)
        return (status,)

    # -- memory between processes

    @function(1, works=True, unsafe=True)
    def cuIpcGetMemHandle(self, pointer: Any) -> tuple[Any, ...]:
        status, context = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
        if self._is_instance(context):
            return (Status.CUDA_ERROR_NOT_SUPPORTED,)
        block = self._memory.find(int(pointer))
        exported = None if block is None or block.opened else block.export()
        if exported is None:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        handle = types.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), exported.pack(), _HANDLE_NBYTES)
        return OK, handle

    @function(1, works=True, unsafe=True)
    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        status, context = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
        exported = Handle.unpack(ctypes.string_at(handle.getPtr(), _HANDLE_NBYTES))
        gpu = next((gpu for gpu in self._gpus if exported and exported.is_of(gpu)), None)
        if flags != 1 or exported is None or gpu is None:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        if self._is_instance(context):
            return (Status.CUDA_ERROR_NOT_SUPPORTED,)
        if exported.pid == os.getpid():
            return (Status.CUDA_ERROR_INVALID_CONTEXT,)
        if gpu is not context.gpu and not self._reaches(context.gpu, gpu):
            return (Status.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,)
        return self._memory.open(exported, context)

    @function(0, works=True, unsafe=True)
    def cuIpcCloseMemHandle(self, pointer: Any) -> tuple[Any, ...]:
        status, closed = self._of_current(lambda ctx: self._memory.close(int(pointer)))
        if status != OK:
            return (status,)
        return (OK if closed else Status.CUDA_ERROR_INVALID_VALUE,)

    def _is_instance(self, context: Context) -> bool:
        return self._visible[context.ordinal][1].startswith("MIG-")
