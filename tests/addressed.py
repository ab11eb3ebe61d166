"""A simulated driver that tells the addresses of its functions, as the real one does."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as types

from dask_devctx.driver.backends import Backend
from dask_devctx.driver.simulated import SimulatedDriver, SimulatedMachine

_GetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
_SetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_GetId = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulonglong))
_Exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
_OfOne = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_OfTwo = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_OfFour = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class AddressedDriver(SimulatedDriver):
    """Wraps functions of the simulated driver as C functions, which C code calls by address."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(machine.gpus, machine.faults)
        self.enqueued: list[str] = []  # the calls by address that added work to a stream
        self.asked: list[tuple[str, int]] = []  # those that asked about a stream, with the stream
        self.busy: set[int] = set()  # the streams that have work
        self._functions: dict[bytes, Any] = {
            b"cuCtxGetCurrent": _GetCurrent(self._get_current),
            b"cuCtxSetCurrent": _SetCurrent(self._set_current),
            b"cuCtxGetId": _GetId(self._get_id),
            b"cuThreadExchangeStreamCaptureMode": _Exchange(self._exchange),
            b"cuMemFree": self._calls("cuMemFree", 1),
            b"cuEventQuery": self._calls("cuEventQuery", 1),
            b"cuCtxRecordEvent": self._calls("cuCtxRecordEvent", 2),
            b"cuMemcpyAsync": self._calls("cuMemcpyAsync", 4, self.enqueued),
            b"cuEventRecord": self._calls("cuEventRecord", 2, self.enqueued),
            b"cuLaunchKernelEx": _OfFour(self._launch),
            b"cuStreamIsCapturing": _OfTwo(self._is_capturing),
            b"cuStreamQuery": _OfOne(self._query_stream),
        }

    def _get_current(self, handle: Any) -> int:
        status, context = self.cuCtxGetCurrent()
        handle[0] = int(context or 0)
        return int(status)

    def _set_current(self, handle: int | None) -> int:
        (status,) = self.cuCtxSetCurrent(types.CUcontext(handle or 0))
        return int(status)

    def _get_id(self, handle: int | None, number: Any) -> int:
        status, found = self.cuCtxGetId(types.CUcontext(handle or 0))
        if status == 0:
            number[0] = int(found)
        return int(status)

    def _exchange(self, mode: Any) -> int:
        status, before = self.cuThreadExchangeStreamCaptureMode(mode[0])
        if status == 0:
            mode[0] = int(before)
        return int(status)

    def _calls(self, name: str, count: int, noted: list[str] | None = None) -> Any:
        def call(*numbers: int | None) -> int:
            if noted is not None:
                noted.append(name)
            return int(getattr(self, name)(*[number or 0 for number in numbers[:count]])[0])

        return _OfFour(call)

    def _launch(self, config: int | None, kernel: int | None, params: int | None, _: Any) -> int:
        self.enqueued.append("cuLaunchKernelEx")
        given = types.CUlaunchConfig(config or 0), types.CUfunction(kernel or 0)
        return int(self.cuLaunchKernelEx(*given, params or 0, 0)[0])

    def _is_capturing(self, stream: int | None, answer: int | None) -> int:
        self.asked.append(("cuStreamIsCapturing", stream or 0))
        status, captured = self.cuStreamIsCapturing(types.CUstream(stream or 0))
        ctypes.c_int.from_address(answer or 0).value = int(captured or 0)
        return int(status)

    def _query_stream(self, stream: int | None) -> int:
        self.asked.append(("cuStreamQuery", stream or 0))
        return int(types.CUresult.CUDA_ERROR_NOT_READY) if stream in self.busy else 0

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[Any, ...]:
        if name not in self._functions:  # the package calls its Python method instead
            return types.CUresult.CUDA_ERROR_NOT_FOUND, None, 0
        address = ctypes.cast(self._functions[name], ctypes.c_void_p).value
        return types.CUresult.CUDA_SUCCESS, address, 0


def addressed(machine: SimulatedMachine) -> Backend:
    """Return the machine's backend, with a driver that tells its addresses."""
    machine.driver = AddressedDriver(machine)
    return machine.backend()
