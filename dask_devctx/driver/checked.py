"""One call to the driver, checked: by its Python binding, or by the address of its C function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask_devctx.driver import statuses
from dask_devctx.errors import DeviceMemoryError, DriverError, DriverUnavailableError

try:
    from dask_devctx.driver._scope import invoke, invoke_out
except ImportError:  # it was not built
    invoke = invoke_out = None  # type: ignore[assignment]


class Checked:
    """Calls functions of one driver, and raises an error for each status but success."""

    def __init__(self, driver: Any) -> None:
        from cuda.bindings import driver as types  # the enumerations; loads no driver

        self.driver = driver
        self.types: Any = types
        self.forked = False
        self._addresses: dict[str, int] = {}

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

    def address(self, function: str, version: int) -> int | None:
        """Return the address of a C function; None where the driver does not tell it."""
        # `version` is the version of CUDA that introduced the signature which the caller uses.
        ask = getattr(self.driver, "cuGetProcAddress", None)
        if ask is None:
            return None
        status, address, *_ = ask(function.encode(), version, 0)
        return int(address) if status == 0 and address else None

    # -- calls by address, which keep the GIL

    def status(self, function: str, version: int, *numbers: int) -> int | None:
        """Call a short C function by its address; return its status, None without an address."""
        # The bindings release the GIL around each call. While other threads are busy, this thread
        # often waits milliseconds to get it back. These functions take microseconds at most.
        address = self._addresses.get(function)
        if address is None:
            address = self._found(function, version)
        return invoke(address, *numbers) if address else None

    def out(self, function: str, version: int, value: int, *numbers: int) -> int | None:
        """Call a function whose first argument points to `value`; return what it left there."""
        address = self._addresses.get(function)
        if address is None:
            address = self._found(function, version)
        if not address:
            return None
        status, value = invoke_out(address, value, *numbers)
        if status:
            raise self.error(function, status)
        return value

    def _found(self, function: str, version: int) -> int:
        """Return, and keep, the address by which a function is called; 0 where there is none."""
        address = 0 if invoke is None else self.address(function, version) or 0
        self._addresses[function] = address
        return address

    def called(self, function: str, version: int, *numbers: int) -> bool:
        """Return whether the function was called by its address; raise if that call failed."""
        status = self.status(function, version, *numbers)
        if status:
            raise self.error(function, status)
        return status is not None
