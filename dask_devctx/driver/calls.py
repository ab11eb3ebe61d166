"""The driver's calls for the process, its devices and contexts: checked, in Python's own types."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask_devctx.driver import statuses
from dask_devctx.driver.checked import Checked
from dask_devctx.driver.work import WorkCalls

if TYPE_CHECKING:
    import uuid


class Calls:
    """Checked calls of one driver; a call that fails raises a DriverError."""

    # Contexts are the integers of their handles, 0 for none; devices are CUDA's ordinals.

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.checked = checked = Checked(driver)
        self.work = WorkCalls(checked)
        self.types = checked.types
        self._value, self._error = checked.value, checked.error
        self._status, self._out = checked.status, checked.out

    # -- the process

    def init(self) -> None:
        self._value(self.driver.cuInit, 0)

    def version(self) -> int:
        """Return the version of CUDA that the driver supports, 13000 for 13.0."""
        return int(self._value(self.driver.cuDriverGetVersion))

    # -- devices

    def device_count(self) -> int:
        return int(self._value(self.driver.cuDeviceGetCount))

    def device_uuid(self, ordinal: int) -> uuid.UUID:
        """Return the UUID of a GPU or of a MIG instance; it does not tell which of the two."""
        import uuid

        # CUDA 12's bindings have two functions. Only the one with _v2 knows MIG instances.
        function = getattr(self.driver, "cuDeviceGetUuid_v2", self.driver.cuDeviceGetUuid)
        return uuid.UUID(bytes=bytes(self._value(function, ordinal).bytes))

    def device_name(self, ordinal: int) -> str:
        return self._text(self.driver.cuDeviceGetName, ordinal)

    def device_pci_bus_id(self, ordinal: int) -> str:
        return self._text(self.driver.cuDeviceGetPCIBusId, ordinal)

    def _text(self, function: Callable[..., Any], ordinal: int) -> str:
        raw: bytes = self._value(function, 128, ordinal)
        return raw.split(b"\0")[0].decode()

    def device_total_memory(self, ordinal: int) -> int:
        """Return bytes."""
        return int(self._value(self.driver.cuDeviceTotalMem, ordinal))

    def device_compute_capability(self, ordinal: int) -> tuple[int, int]:
        kind = self.types.CUdevice_attribute
        major = kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        minor = kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        ask = self.driver.cuDeviceGetAttribute
        return int(self._value(ask, major, ordinal)), int(self._value(ask, minor, ordinal))

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return bool(self._value(self.driver.cuDeviceCanAccessPeer, ordinal, peer))

    # -- the primary context of a device

    def primary_retain(self, ordinal: int) -> int:
        return int(self._value(self.driver.cuDevicePrimaryCtxRetain, ordinal))

    def primary_state(self, ordinal: int) -> tuple[int, bool]:
        """Return the flags that are set, and whether the context is active."""
        flags, active = self._value(self.driver.cuDevicePrimaryCtxGetState, ordinal)
        return int(flags), bool(active)

    def primary_set_flags(self, ordinal: int, flags: int) -> None:
        self._value(self.driver.cuDevicePrimaryCtxSetFlags, ordinal, flags)

    # -- contexts

    def create(self, ordinal: int, flags: int) -> int:
        """Create a context; the driver makes it current."""
        try:
            return int(self._value(self.driver.cuCtxCreate, None, flags, ordinal))
        except TypeError:  # CUDA 12's bindings have no such first argument
            return int(self._value(self.driver.cuCtxCreate, flags, ordinal))

    def destroy(self, context: int) -> None:
        self._value(self.driver.cuCtxDestroy, context)

    def current(self) -> int:
        """Return the context that is current on this thread; 0 where there is none."""
        found = self._out("cuCtxGetCurrent", 0)
        return int(self._value(self.driver.cuCtxGetCurrent)) if found is None else found

    def current_or_uninitialised(self) -> int:
        """Like :meth:`current`, but 0 where nothing has initialised CUDA yet."""
        status, context = self.driver.cuCtxGetCurrent()
        if status == statuses.NOT_INITIALIZED and not self.checked.forked:
            return 0
        if status != 0:
            raise self._error("cuCtxGetCurrent", status)
        return int(context)

    def set_current(self, context: int) -> None:
        (status,) = self.driver.cuCtxSetCurrent(context)
        if status != 0:
            raise self._error("cuCtxSetCurrent", status)

    def current_error(self, status: int) -> Exception:
        """Return the error that :meth:`current` raises for a status, for callers by address."""
        return self._error("cuCtxGetCurrent", status)

    def set_current_error(self, status: int) -> Exception:
        """Return the error that :meth:`set_current` raises for a status, for callers by address."""
        return self._error("cuCtxSetCurrent", status)

    def context_id(self, context: int) -> int | None:
        """Return a number that no other context ever has; None for a destroyed context."""
        # The handle must have belonged to a context once: the driver does not check that.
        cell = array("Q", (0,))
        status = self._status("cuCtxGetId", context, cell.buffer_info()[0])
        number = cell[0]
        if status is None:
            status, number = self.driver.cuCtxGetId(context)
        if status == statuses.CONTEXT_IS_DESTROYED:
            return None
        if status != 0:
            raise self._error("cuCtxGetId", status)
        return int(number)

    # -- the current context

    def current_device(self) -> int:
        return int(self._value(self.driver.cuCtxGetDevice))

    def flags(self) -> int:
        return int(self._value(self.driver.cuCtxGetFlags))

    def set_flags(self, flags: int) -> None:
        self._value(self.driver.cuCtxSetFlags, flags)

    def limit(self, which: int) -> int:
        return int(self._value(self.driver.cuCtxGetLimit, self._limit(which)))

    def set_limit(self, which: int, value: int) -> None:
        self._value(self.driver.cuCtxSetLimit, self._limit(which), value)

    def _limit(self, which: int) -> Any:
        try:
            return self.types.CUlimit(which)
        except ValueError:  # the bindings are older than the limit
            raise self._error("cuCtxGetLimit", statuses.UNSUPPORTED_LIMIT) from None

    def synchronize(self) -> None:
        self._value(self.driver.cuCtxSynchronize)

    def enable_peer_access(self, peer_context: int) -> None:
        (status,) = self.driver.cuCtxEnablePeerAccess(peer_context, 0)
        if status not in (0, statuses.PEER_ACCESS_ALREADY_ENABLED):
            raise self._error("cuCtxEnablePeerAccess", status)
