"""The CUDA driver's contexts, for simulated GPUs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.simulated.devices import Context, SimulatedDevices, SimulatedGPU
from dask_devctx.driver.simulated.faults import WORKING_CALLS, Faults, Refused, Status, function

_SCHEDULING_FLAGS = (0, 1, 2, 4)
_KNOWN_FLAGS = int(types.CUctx_flags.CU_CTX_FLAGS_MASK)


class SimulatedCrashError(BaseException):
    """The real driver would have ended the process here (a segmentation fault)."""


class _Thread(threading.local):
    """The driver's state of one thread: above all its stack of contexts."""

    def __init__(self) -> None:
        self.stack: list[Context] = []
        self.capture_mode: Any = types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


class SimulatedContexts(SimulatedDevices):
    """The functions of ``cuda.bindings.driver`` for devices and contexts."""

    def __init__(self, gpus: Sequence[SimulatedGPU], faults: Faults) -> None:
        super().__init__(gpus, faults)
        self._thread = _Thread()
        self._contexts: dict[int, Context] = {}
        self._handles = itertools.count(0x7000_0000, 0x100)
        self._ids = itertools.count(1)

    def _check(self, function: str) -> None:
        context = self._current()
        if function in WORKING_CALLS and context is not None and context.gpu.lost:
            raise Refused(Status.CUDA_ERROR_UNKNOWN)

    # -- primary contexts

    @function(1, works=True)
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        with self._lock:
            gpu = self._usable(device)
            if gpu.primary is None:
                gpu.primary = self._new_context(gpu, int(device), gpu.primary_flags, True)
            elif not gpu.primary.alive:  # the same handle comes to life again
                gpu.primary.revive(next(self._ids))
            gpu.primary_retained += 1
            return types.CUcontext(gpu.primary.handle)

    def _usable(self, device: Any) -> SimulatedGPU:
        gpu = self._gpu(device)
        if gpu.lost or gpu.compute_mode != "default":
            raise Refused(Status.CUDA_ERROR_DEVICE_UNAVAILABLE)
        return gpu

    @function(0)
    def cuDevicePrimaryCtxRelease(self, device: Any) -> Any:
        with self._lock:
            gpu = self._gpu(device)
            if gpu.primary is None or not gpu.primary_retained:
                raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
            gpu.primary_retained -= 1
            if not gpu.primary_retained:
                self._end(gpu.primary)
                gpu.primary_flags = 0

    @function(2)
    def cuDevicePrimaryCtxGetState(self, device: Any) -> Any:
        gpu = self._gpu(device)
        return gpu.primary_flags, int(gpu.primary is not None and gpu.primary.alive)

    @function(0)
    def cuDevicePrimaryCtxSetFlags(self, device: Any, flags: int) -> Any:
        gpu = self._gpu(device)
        gpu.primary_flags = _valid(flags)
        if gpu.primary is not None:
            gpu.primary.flags = flags

    # -- contexts

    def _new_context(
        self, gpu: SimulatedGPU, ordinal: int, flags: int, is_primary: bool
    ) -> Context:
        context = Context(next(self._handles), next(self._ids), gpu, ordinal, flags, is_primary)
        self._contexts[context.handle] = context
        return context

    @function(1, works=True)
    def cuCtxCreate(self, params: Any, flags: int, device: Any) -> Any:
        if params is not None:
            raise AttributeError("the simulated driver has no context parameters")
        with self._lock:
            context = self._new_context(self._usable(device), int(device), _valid(flags), False)
            self._thread.stack.append(context)
            return types.CUcontext(context.handle)

    @function(0)
    def cuCtxDestroy(self, context: Any) -> Any:
        with self._lock:
            if not int(context):
                raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
            found = self._known(context)
            if found.is_primary:
                raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
            if not found.alive:
                raise Refused(Status.CUDA_ERROR_CONTEXT_IS_DESTROYED)
            self._end(found)
            if self._current() is found:  # on other threads it stays current, dead
                self._thread.stack.pop()

    def _end(self, context: Context) -> None:
        context.alive = False

    def _known(self, context: Any) -> Context:
        found = self._contexts.get(int(context))
        if found is None:
            raise SimulatedCrashError(f"{context} was never a context")
        return found

    def _current(self) -> Context | None:
        return self._thread.stack[-1] if self._thread.stack else None

    @function(1)
    def cuCtxGetCurrent(self) -> Any:
        context = self._current()
        return types.CUcontext(context.handle if context else 0)

    @function(0)
    def cuCtxSetCurrent(self, context: Any) -> Any:
        stack = self._thread.stack
        if not int(context):
            del stack[-1:]
            return
        found = self._known(context)
        if not found.alive and not found.is_primary:
            raise SimulatedCrashError(f"{context} was destroyed and is made current")
        stack[-1:] = [found]

    @function(0)
    def cuCtxPushCurrent(self, context: Any) -> Any:
        if not int(context):
            raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
        self._thread.stack.append(self._known(context))

    @function(1)
    def cuCtxPopCurrent(self) -> Any:
        if not self._thread.stack:
            raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
        return types.CUcontext(self._thread.stack.pop().handle)

    @function(1)
    def cuCtxGetId(self, context: Any) -> Any:
        found = self._known(context) if int(context) else self._current()
        return self._alive(found).id

    # -- the current context

    @staticmethod
    def _alive(context: Context | None) -> Context:
        if context is None:
            raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
        if not context.alive:
            raise Refused(Status.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return context

    def _here(self) -> Context:
        """Return the current context."""
        return self._alive(self._current())

    @function(1)
    def cuCtxGetDevice(self) -> Any:
        context = self._current()
        if context is None:
            raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
        return types.CUdevice(context.ordinal)  # a dead context still has a device

    @function(1)
    def cuCtxGetFlags(self) -> Any:
        return self._here().flags

    @function(0)
    def cuCtxSetFlags(self, flags: int) -> Any:
        self._here().flags = _valid(flags)

    @function(1, works=True)
    def cuCtxGetLimit(self, limit: Any) -> Any:
        limits = self._here().limits
        if limit not in limits:
            raise Refused(Status.CUDA_ERROR_UNSUPPORTED_LIMIT)
        return limits[limit]

    @function(0, works=True)
    def cuCtxSetLimit(self, limit: Any, value: int) -> Any:
        limits = self._here().limits
        if limit not in limits:
            raise Refused(Status.CUDA_ERROR_UNSUPPORTED_LIMIT)
        limits[limit] = value

    @function(0, works=True)
    def cuCtxSynchronize(self) -> Any:
        self._here()

    @function(0, works=True)
    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> Any:
        current = self._current()
        if current is None or not current.alive or not int(context):
            raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
        peer = self._known(context)
        if not self._reaches(current.gpu, peer.gpu):
            raise Refused(Status.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        if peer.id in current.peers:
            raise Refused(Status.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        current.peers.add(peer.id)


def _valid(flags: int) -> int:
    if flags & 0x7 not in _SCHEDULING_FLAGS or flags & ~_KNOWN_FLAGS:
        raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
    return flags
