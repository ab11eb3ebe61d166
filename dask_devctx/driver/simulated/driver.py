"""The simulated CUDA driver's events, streams, memory and copies."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.simulated.contexts import SimulatedContexts
from dask_devctx.driver.simulated.faults import Faults
from dask_devctx.driver.simulated.function import OK, Status, function
from dask_devctx.driver.simulated.gpu import Context, SimulatedGPU
from dask_devctx.driver.simulated.memory import Block, Handle, Memory

_DEFAULT_STREAMS = (0, 1, 2)
_UNKNOWN = object()
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
        self._streams: dict[int, Context] = {}
        self._locked_pages: dict[int, int] = {}  # the number of bytes by the first address

    def _end(self, context: Context) -> None:
        super()._end(context)
        self._memory.end(context)

    # -- events: each is reached as soon as it is recorded

    @function(1)
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
        return (OK if found else Status.CUDA_ERROR_INVALID_HANDLE,)

    @function(0)
    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:
        status, current = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
        same = self._events.get(int(event)) is current and self._on(stream) in (None, current)
        if same and int(event) in self._reached:
            self._reached[int(event)] = time.perf_counter()
        return (OK if same else Status.CUDA_ERROR_INVALID_HANDLE,)

    @function(0)
    def cuCtxRecordEvent(self, context: Any, event: Any) -> tuple[Any, ...]:
        same = self._events.get(int(event)) is self._known(context)
        return (OK if same else Status.CUDA_ERROR_INVALID_HANDLE,)

    @function(0)
    def cuEventQuery(self, event: Any) -> tuple[Any, ...]:
        known = int(event) in self._events
        return (OK if known else Status.CUDA_ERROR_INVALID_HANDLE,)

    @function(1)
    def cuEventElapsedTime(self, start: Any, end: Any) -> tuple[Any, ...]:
        reached = [self._reached.get(int(event)) for event in (start, end)]
        first, last = reached
        if first is None or last is None:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        return OK, 1000 * (last - first)

    @function(0)
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any, ...]:
        known = int(event) in self._events and self._on(stream) is not _UNKNOWN
        status = self._of_current(lambda ctx: None)[0]
        if status != OK:
            return (status,)
        return (OK if known else Status.CUDA_ERROR_INVALID_HANDLE,)

    # -- streams: each has always finished its work

    def _on(self, stream: Any) -> Any:
        """Return the context of a stream; None for the default ones, which every context has."""
        return None if int(stream) in _DEFAULT_STREAMS else self._streams.get(int(stream), _UNKNOWN)

    @function(1)
    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        status, context = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
        if int(flags) not in (0, 1):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        stream = types.CUstream(next(self._handles))
        self._streams[int(stream)] = context
        return OK, stream

    @function(0)
    def cuStreamDestroy(self, stream: Any) -> tuple[Any, ...]:
        found = self._streams.pop(int(stream), None)
        return (OK if found else Status.CUDA_ERROR_INVALID_HANDLE,)

    @function(0)
    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        return self._given(stream, lambda ctx: True)

    def _given(self, stream: Any, work: Callable[[Context], bool]) -> tuple[Any, ...]:
        """Do a stream's work at once; the work returns False where an argument is wrong."""
        status, current = self._of_current(lambda ctx: ctx)
        if status != OK:
            return (status,)
        if self._on(stream) is _UNKNOWN:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        return (OK if work(current) else Status.CUDA_ERROR_INVALID_VALUE,)

    @function(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self._thread.capture_mode = self._thread.capture_mode, mode
        return OK, before

    # -- memory

    @function(2)
    def cuMemGetInfo(self) -> tuple[Any, ...]:
        status, gpu = self._of_current(lambda ctx: ctx.gpu)
        if status != OK:
            return (status,)
        return OK, gpu.total_memory - gpu.used_memory, gpu.total_memory

    @function(1)
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

    @function(0)
    def cuMemFree(self, pointer: Any) -> tuple[Any, ...]:
        current = self._current()
        if current is not None and not current.alive:
            return (Status.CUDA_ERROR_CONTEXT_IS_DESTROYED,)
        freed = not int(pointer) or self._memory.free(int(pointer))
        return (OK if freed else Status.CUDA_ERROR_INVALID_VALUE,)

    @function(2)
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

    @function(0)
    def cuMemcpyAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> tuple[Any, ...]:
        return self._given(stream, lambda ctx: self._copy(target, source, nbytes))

    @function(0)
    def cuMemcpyPeerAsync(
        self, target: Any, context: Any, source: Any, of: Any, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        for each in (context, of):
            if not int(each):
                return (Status.CUDA_ERROR_INVALID_CONTEXT,)
            status, _ = self._of_context(self._known(each), lambda ctx: None)
            if status != OK:
                return (status,)
        return self._given(stream, lambda ctx: self._copy(target, source, nbytes))

    def _copy(self, target: Any, source: Any, nbytes: int) -> bool:
        return not nbytes or self._memory.copy(int(target), int(source), nbytes)

    @function(0)
    def cuMemcpyDtoH(self, host: int, source: Any, nbytes: int) -> tuple[Any, ...]:
        return self._with_host(
            source, nbytes, lambda address: ctypes.memmove(host, address, nbytes)
        )

    @function(0)
    def cuMemcpyHtoD(self, target: Any, host: int, nbytes: int) -> tuple[Any, ...]:
        return self._with_host(
            target, nbytes, lambda address: ctypes.memmove(address, host, nbytes)
        )

    @function(0)
    def cuMemcpyDtoHAsync(
        self, host: int, source: Any, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        if self._on(stream) is _UNKNOWN:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        return self._with_host(
            source, nbytes, lambda address: ctypes.memmove(host, address, nbytes)
        )

    @function(0)
    def cuMemcpyHtoDAsync(
        self, target: Any, host: int, nbytes: int, stream: Any
    ) -> tuple[Any, ...]:
        if self._on(stream) is _UNKNOWN:
            return (Status.CUDA_ERROR_INVALID_HANDLE,)
        return self._with_host(
            target, nbytes, lambda address: ctypes.memmove(address, host, nbytes)
        )

    @function(0)
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

    @function(0)
    def cuMemHostUnregister(self, host: int) -> tuple[Any, ...]:
        if int(host) not in self._locked_pages:
            return (Status.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
        status = self._of_current(lambda ctx: None)[0]
        if status == OK:
            self._locked_pages.pop(int(host), None)
        return (status,)

    def _with_host(
        self, pointer: Any, nbytes: int, move: Callable[[int], object]
    ) -> tuple[Any, ...]:
        status, block = self._of_current(lambda ctx: self._memory.find(int(pointer), nbytes))
        if status != OK:
            return (status,)
        if nbytes and block is None:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        if nbytes:
            move(block.host_address(int(pointer)))
        return (OK,)

    # -- memory between processes

    @function(1)
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

    @function(1)
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

    @function(0)
    def cuIpcCloseMemHandle(self, pointer: Any) -> tuple[Any, ...]:
        status, closed = self._of_current(lambda ctx: self._memory.close(int(pointer)))
        if status != OK:
            return (status,)
        return (OK if closed else Status.CUDA_ERROR_INVALID_VALUE,)

    def _is_instance(self, context: Context) -> bool:
        return self._visible[context.ordinal][1].startswith("MIG-")
