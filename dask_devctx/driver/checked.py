"""One call to the driver, checked: by its Python binding, or by the address of its C function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from dask_devctx.driver import statuses
from dask_devctx.errors import DeviceMemoryError, DriverError, DriverUnavailableError

try:
    from dask_devctx.driver._scope import invoke, invoke_out
except ImportError:  # it was not built
    invoke = invoke_out = None  # type: ignore[assignment]

# The C functions that are called by their address: with each, the version of CUDA that introduced
# the signature used here.
_VERSIONS: Final = {
    "cuCtxGetCurrent": 4000,
    "cuCtxGetId": 12000,
    "cuCtxRecordEvent": 12050,
    "cuCtxSetCurrent": 4000,
    "cuEventQuery": 2000,
    "cuEventRecord": 2000,
    "cuLaunchKernelEx": 11060,
    "cuMemFree": 3020,
    "cuMemcpyAsync": 4000,
    "cuStreamIsCapturing": 10000,
    "cuStreamQuery": 2000,
    "cuThreadExchangeStreamCaptureMode": 10010,
}


class Checked:
    """Calls functions of one driver, and raises an error for each status but success."""

    def __init__(self, driver: Any) -> None:
        from cuda.bindings import driver as types  # the enumerations; loads no driver

        self.driver = driver
        self.types: Any = types
        self.forked = False
        # Returns the address of a C function; 0 where it is not to be called by one.
        self.address = functools.cache(self._address)

    def value(self, function: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        try:
            status, *values = function(*args)
        except RuntimeError as error:  # the bindings raise it for a function that the driver lacks
            missing = self._missing(function.__name__, error)
            if missing is None:
                raise
            raise missing from error
        if status != 0:
            raise self.error(function.__name__, status)
        return values[0] if len(values) == 1 else tuple(values)

    def error(self, function: str, status: Any) -> Exception:
        if self.forked:
            return DriverUnavailableError(
                f"{function} failed: CUDA was initialised before this process was forked",
                "Start processes that use a GPU with the 'spawn' or 'forkserver' method",
            )
        try:
            known = self.types.CUresult(status)
        except ValueError:  # a driver newer than the bindings
            return DriverError(function, "an unknown status", int(status))
        _, text = self.driver.cuGetErrorString(known)
        out_of_memory = known == self.types.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        kind = DeviceMemoryError if out_of_memory else DriverError
        words = [(text or b"").decode(), statuses.REMEDIES.get(int(known), "")]
        return kind(function, known.name, int(known), ". ".join(filter(None, words)))

    def _missing(self, function: str, error: Exception) -> DriverUnavailableError | None:
        try:
            _, version = self.driver.cuDriverGetVersion()
        except Exception:  # there is no driver at all
            return None
        supports = f"{version // 1000}.{version % 1000 // 10}"
        return DriverUnavailableError(
            f"the driver (CUDA {supports}) has no {function}: {error}",
            "Update the driver, or install the cuda-bindings of its CUDA version",
        )

    # -- calls by address, which keep the GIL

    def _address(self, function: str) -> int:
        ask = getattr(self.driver, "cuGetProcAddress", None)
        if ask is None or invoke is None:
            return 0
        status, address, *_ = ask(function.encode(), _VERSIONS[function], 0)
        return 0 if status else int(address)

    def status(self, function: str, *numbers: int) -> int | None:
        """Call a short C function by its address; return its status, None without an address."""
        # The bindings release the GIL around each call. While other threads are busy, this thread
        # often waits milliseconds to get it back. These functions take microseconds at most.
        address = self.address(function)
        return invoke(address, *numbers) if address else None

    def out(self, function: str, value: int, *numbers: int) -> int | None:
        """Call a function whose first argument points to `value`; return what it left there."""
        if not (address := self.address(function)):
            return None
        status, value = invoke_out(address, value, *numbers)
        if status:
            raise self.error(function, status)
        return value

    def called(self, function: str, *numbers: int) -> bool:
        """Return whether the function was called by its address; raise if that call failed."""
        status = self.status(function, *numbers)
        if status:
            raise self.error(function, status)
        return status is not None
