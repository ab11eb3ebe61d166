"""The simulated CUDA driver's memory and copies."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.simulated.devices import Context, SimulatedGPU
from dask_devctx.driver.simulated.faults import Faults, Refused, Status, function
from dask_devctx.driver.simulated.memory import Block, Handle, Memory
from dask_devctx.driver.simulated.streams import SimulatedStreams
from dask_devctx.driver.work import BOX_NBYTES, IPC_HANDLE_NBYTES


class SimulatedDriver(SimulatedStreams):
    """``cuda.bindings.driver`` for simulated GPUs, whose work is done at once."""

    def __init__(self, gpus: Sequence[SimulatedGPU], faults: Faults) -> None:
        super().__init__(gpus, faults)
        self._memory = Memory()
        self._libraries: dict[int, bytes] = {}
        self._locked_pages: dict[int, int] = {}  # the number of bytes by the first address

    def _end(self, context: Context) -> None:
        super()._end(context)
        self._memory.end(context)

    # -- memory

    @function(2, works=True)
    def cuMemGetInfo(self) -> Any:
        gpu = self._here().gpu
        return gpu.total_memory - gpu.used_memory, gpu.total_memory

    @function(1, works=True, unsafe=True)
    def cuMemAlloc(self, nbytes: int) -> Any:
        context = self._here()
        if nbytes == 0:
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
        base = self._memory.allocate(context, nbytes)
        if base is None:
            raise Refused(Status.CUDA_ERROR_OUT_OF_MEMORY)
        return types.CUdeviceptr(base)

    @function(0, works=True, unsafe=True)
    def cuMemFree(self, pointer: Any) -> Any:
        current = self._current()
        if current is not None and not current.alive:
            raise Refused(Status.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        if int(pointer) and not self._memory.free(int(pointer)):
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)

    def block(self, pointer: int) -> Block | None:
        """Return the allocation with this address; for simulated libraries, not a CUDA function."""
        return self._memory.find(pointer)

    # -- copies, which are done when the call returns

    @function(0, works=True)
    def cuMemcpyAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> Any:
        self._give(stream, lambda: self._copy(target, source, nbytes))

    @function(0, works=True)
    def cuMemcpyPeerAsync(
        self, target: Any, context: Any, source: Any, of: Any, nbytes: int, stream: Any
    ) -> Any:
        for each in (context, of):
            if not int(each):
                raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
            self._alive(self._known(each))
        self._give(stream, lambda: self._copy(target, source, nbytes))

    @function(0, works=True)
    def cuMemcpy3DAsync(self, copy: Any, stream: Any) -> Any:
        self._give(stream, lambda: self._copy_box(copy))

    # -- the package's own kernel, and no other

    @function(1, works=True, unsafe=True)
    def cuLibraryLoadData(self, code: bytes, *options: Any) -> Any:
        self._here()
        library = types.CUlibrary(next(self._handles))
        self._libraries[int(library)] = code
        return library

    @function(1)
    def cuLibraryGetKernel(self, library: Any, name: bytes) -> Any:
        code = self._libraries.get(int(library))
        if code is None or b".entry " + name not in code:
            raise Refused(Status.CUDA_ERROR_NOT_FOUND)
        return types.CUkernel(int(library))

    @function(0, works=True)
    def cuLaunchKernelEx(self, config: Any, kernel: Any, params: int, extra: int) -> Any:
        if int(kernel) not in self._libraries:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        first = ctypes.c_uint64.from_address(params).value
        boxes = range(first, first + config.gridDimX * BOX_NBYTES, BOX_NBYTES)

        def run() -> bool:
            if not all(self._copy_box(types.CUDA_MEMCPY3D(box)) for box in boxes):
                self._faults.poison(Status.CUDA_ERROR_ILLEGAL_ADDRESS)
            return True

        self._give(config.hStream, run)

    def _copy_box(self, copy: Any) -> bool:
        """Copy rows of bytes, each at its pitch, and planes of such rows."""
        width, height, depth = copy.WidthInBytes, copy.Height, copy.Depth
        if not (width and height and depth):
            return True
        ends = []
        for end in ("dst", "src"):
            pitch, rows = getattr(copy, f"{end}Pitch"), getattr(copy, f"{end}Height")
            offsets = [getattr(copy, f"{end}{name}") for name in ("XInBytes", "Y", "Z")]
            if any(offsets) or pitch < width or (rows < height and depth > 1):
                return False  # offsets are not simulated
            extent = ((depth - 1) * rows + height - 1) * pitch + width
            kind, address = getattr(copy, f"{end}MemoryType"), int(getattr(copy, f"{end}Device"))
            if kind == types.CUmemorytype.CU_MEMORYTYPE_HOST:
                address = int(getattr(copy, f"{end}Host"))
            else:
                block = self._memory.find(address, extent)
                if block is None or kind != types.CUmemorytype.CU_MEMORYTYPE_DEVICE:
                    return False
                address = block.host_address(address)
            ends.append((address, pitch, rows))
        (to, to_pitch, to_rows), (of, of_pitch, of_rows) = ends
        for plane in range(depth):
            for row in range(height):
                target = to + (plane * to_rows + row) * to_pitch
                ctypes.memmove(target, of + (plane * of_rows + row) * of_pitch, width)
        return True

    def _copy(self, target: Any, source: Any, nbytes: int) -> bool:
        return not nbytes or self._memory.copy(int(target), int(source), nbytes)

    @function(0, works=True)
    def cuMemcpyDtoHAsync(self, host: int, source: Any, nbytes: int, stream: Any) -> Any:
        self._give(stream, lambda: self._move(source, nbytes, lambda at: (host, at)))

    @function(0, works=True)
    def cuMemcpyHtoDAsync(self, target: Any, host: int, nbytes: int, stream: Any) -> Any:
        self._give(stream, lambda: self._move(target, nbytes, lambda at: (at, host)))

    def _move(self, pointer: Any, nbytes: int, ends: Callable[[int], tuple[int, int]]) -> bool:
        """Copy between device and host: ``ends`` gives target and source, by host addresses."""
        block = self._memory.find(int(pointer), nbytes)
        if nbytes and block is not None:
            ctypes.memmove(*ends(block.host_address(int(pointer))), nbytes)
        return not nbytes or block is not None

    @function(0, works=True, unsafe=True)
    def cuMemHostRegister(self, host: int, nbytes: int, flags: int) -> Any:
        self._here()
        if not int(host) or not nbytes or flags & ~0xF:
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
        end = int(host) + nbytes
        for begin, length in self._locked_pages.items():
            if begin < end and int(host) < begin + length:
                raise Refused(Status.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        self._locked_pages[int(host)] = nbytes

    @function(0, works=True, unsafe=True)
    def cuMemHostUnregister(self, host: int) -> Any:
        if int(host) not in self._locked_pages:
            raise Refused(Status.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
        self._here()
        self._locked_pages.pop(int(host), None)

    # -- memory between processes

    @function(1, works=True, unsafe=True)
    def cuIpcGetMemHandle(self, pointer: Any) -> Any:
        context = self._here()
        if self._is_instance(context):
            raise Refused(Status.CUDA_ERROR_NOT_SUPPORTED)
        block = self._memory.find(int(pointer))
        exported = None if block is None or block.opened else block.export()
        if exported is None:
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
        handle = types.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), exported.pack(), IPC_HANDLE_NBYTES)
        return handle

    @function(1, works=True, unsafe=True)
    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        context = self._here()
        exported = Handle.unpack(ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES))
        gpu = next((gpu for gpu in self._gpus if exported and exported.is_of(gpu)), None)
        if flags != 1 or exported is None or gpu is None:
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
        if self._is_instance(context):
            raise Refused(Status.CUDA_ERROR_NOT_SUPPORTED)
        if exported.pid == os.getpid():
            raise Refused(Status.CUDA_ERROR_INVALID_CONTEXT)
        if gpu is not context.gpu and not self._reaches(context.gpu, gpu):
            raise Refused(Status.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        return types.CUdeviceptr(self._memory.open(exported, context))

    @function(0, works=True, unsafe=True)
    def cuIpcCloseMemHandle(self, pointer: Any) -> Any:
        self._here()
        if not self._memory.close(int(pointer)):
            raise Refused(Status.CUDA_ERROR_INVALID_VALUE)

    def _is_instance(self, context: Context) -> bool:
        return self._visible[context.ordinal][1].startswith("MIG-")
