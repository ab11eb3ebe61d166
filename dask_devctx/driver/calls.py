"""The driver's calls as this package makes them: checked, and in Python's own types.

Contexts are the integers of their handles, 0 for none; devices are CUDA's ordinals. Each
method makes the one call that its ``References`` would name: the C name stands in its body.
A call that fails raises :class:`~dask_devctx.errors.DriverError`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask_devctx.driver import statuses
from dask_devctx.errors import (
    DeviceMemoryError,
    DriverError,
    DriverUnavailableError,
    ForkedProcessError,
)

try:
    from dask_devctx._scope import invoke, invoke_out
except ImportError:  # it was not built
    invoke = invoke_out = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import uuid

    from dask_devctx.driver.protocol import Driver

# CUDA's own handles for the streams that need no making.
LEGACY_STREAM = 1
PER_THREAD_STREAM = 2
# The capture mode in which a thread's calls are not held against graphs that others capture.
RELAXED_CAPTURE = 2


class Calls:
    """Checked calls of one driver.

    Parameters
    ----------
    driver
        ``cuda.bindings.driver``, or anything with its functions.

    Notes
    -----
    Thread-safe, as the driver is. "Current" is a matter of the calling thread.
    """

    def __init__(self, driver: Driver) -> None:
        from cuda.bindings import driver as types  # the enumerations; loads no driver

        self.driver = driver
        self.types: Any = types
        self.forked = False
        self._addresses: dict[str, int] = {}

    def _value(self, function: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        try:
            status, *values = function(*args)
        except RuntimeError as error:  # the bindings' word for a function that the driver lacks
            missing = self._missing(function.__name__, error)
            if missing is None:
                raise
            raise missing from error
        if status != 0:
            raise self._error(function.__name__, status)
        return values[0] if len(values) == 1 else tuple(values)

    def _error(self, function: str, status: Any) -> Exception:
        if self.forked:
            return ForkedProcessError(
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
        """Where a C function of the driver is, or None where the driver does not tell.

        ``version`` is that of the CUDA that gave the function the shape that the caller knows.
        """
        ask = getattr(self.driver, "cuGetProcAddress", None)
        if ask is None:
            return None
        status, address, *_ = ask(function.encode(), version, 0)
        return int(address) if status == 0 and address else None

    # -- by the address, with Python's lock kept

    def _status(self, function: str, version: int, *numbers: int) -> int | None:
        """Call a short C function by its address; its status, or None where there is no address.

        The bindings give Python's lock up around each call. Where other threads are busy it is
        often milliseconds until it comes back, and these functions take a microsecond at most.
        """
        address = self._address(function, version)
        return invoke(address, *numbers) if address else None

    def _out(self, function: str, version: int, value: int, *numbers: int) -> int | None:
        """The same for a function that changes what its first argument points to; that value."""
        address = self._address(function, version)
        if not address:
            return None
        status, value = invoke_out(address, value, *numbers)
        if status:
            raise self._error(function, status)
        return value

    def _address(self, function: str, version: int) -> int:
        address = self._addresses.get(function)
        if address is None:
            found = None if invoke is None else self.address(function, version)
            address = self._addresses[function] = found or 0
        return address

    def _called(self, function: str, version: int, *numbers: int) -> bool:
        """Whether the function was called by its address; raises where it was, and failed."""
        status = self._status(function, version, *numbers)
        if status:
            raise self._error(function, status)
        return status is not None

    # -- the process

    def init(self) -> None:
        self._value(self.driver.cuInit, 0)

    def version(self) -> int:
        """CUDA's version that the driver supports, 13000 for 13.0."""
        return int(self._value(self.driver.cuDriverGetVersion))

    # -- devices

    def device_count(self) -> int:
        return int(self._value(self.driver.cuDeviceGetCount))

    def device_uuid(self, ordinal: int) -> uuid.UUID:
        """A MIG instance's own where the ordinal names one; nothing in it says which it is."""
        import uuid

        # CUDA 12's bindings have the function that knows instances beside one that does not.
        function = getattr(self.driver, "cuDeviceGetUuid_v2", self.driver.cuDeviceGetUuid)
        return uuid.UUID(bytes=bytes(self._value(function, self._device(ordinal)).bytes))

    def device_name(self, ordinal: int) -> str:
        raw: bytes = self._value(self.driver.cuDeviceGetName, 128, self._device(ordinal))
        return raw.split(b"\0")[0].decode()

    def device_pci_bus_id(self, ordinal: int) -> str:
        raw: bytes = self._value(self.driver.cuDeviceGetPCIBusId, 32, self._device(ordinal))
        return raw.split(b"\0")[0].decode()

    def device_total_memory(self, ordinal: int) -> int:
        """Bytes."""
        return int(self._value(self.driver.cuDeviceTotalMem, self._device(ordinal)))

    def device_compute_capability(self, ordinal: int) -> tuple[int, int]:
        kind = self.types.CUdevice_attribute
        major, minor = (
            int(self._value(self.driver.cuDeviceGetAttribute, which, self._device(ordinal)))
            for which in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return major, minor

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return bool(
            self._value(
                self.driver.cuDeviceCanAccessPeer, self._device(ordinal), self._device(peer)
            )
        )

    def _device(self, ordinal: int) -> Any:
        return self._value(self.driver.cuDeviceGet, ordinal)

    # -- the primary context of a device

    def primary_retain(self, ordinal: int) -> int:
        return int(self._value(self.driver.cuDevicePrimaryCtxRetain, self._device(ordinal)))

    def primary_release(self, ordinal: int) -> None:
        self._value(self.driver.cuDevicePrimaryCtxRelease, self._device(ordinal))

    def primary_state(self, ordinal: int) -> tuple[int, bool]:
        """The flags that are set, and whether the context is active."""
        flags, active = self._value(self.driver.cuDevicePrimaryCtxGetState, self._device(ordinal))
        return int(flags), bool(active)

    def primary_set_flags(self, ordinal: int, flags: int) -> None:
        self._value(self.driver.cuDevicePrimaryCtxSetFlags, self._device(ordinal), flags)

    # -- contexts

    def create(self, ordinal: int, flags: int) -> int:
        """A new context; the driver makes it current."""
        device = self._device(ordinal)
        try:
            return int(self._value(self.driver.cuCtxCreate, None, flags, device))
        except TypeError:  # CUDA 12's bindings take no parameters' structure
            return int(self._value(self.driver.cuCtxCreate, flags, device))

    def destroy(self, context: int) -> None:
        self._value(self.driver.cuCtxDestroy, self.types.CUcontext(context))

    def current(self) -> int:
        """The context that is current on this thread; 0 where there is none."""
        found = self._out("cuCtxGetCurrent", 4000, 0)
        if found is not None:
            return found
        status, context = self.driver.cuCtxGetCurrent()
        if status != 0:
            raise self._error("cuCtxGetCurrent", status)
        return int(context)

    def current_or_uninitialised(self) -> int:
        """As :meth:`current`, and 0 where nothing has initialised CUDA yet."""
        status, context = self.driver.cuCtxGetCurrent()
        if int(status) == int(self.types.CUresult.CUDA_ERROR_NOT_INITIALIZED) and not self.forked:
            return 0
        if status != 0:
            raise self._error("cuCtxGetCurrent", status)
        return int(context)

    def set_current(self, context: int) -> None:
        (status,) = self.driver.cuCtxSetCurrent(self.types.CUcontext(context))
        if status != 0:
            raise self._error("cuCtxSetCurrent", status)

    def current_address(self) -> int | None:
        """Where the C function behind :meth:`current` is: ``int f(void **context)``."""
        return self.address("cuCtxGetCurrent", 4000)

    def set_current_address(self) -> int | None:
        """Where the C function behind :meth:`set_current` is: ``int f(void *context)``."""
        return self.address("cuCtxSetCurrent", 4000)

    def current_error(self, status: int) -> Exception:
        """What :meth:`current` raises for a status, for those who called by the address."""
        return self._error("cuCtxGetCurrent", status)

    def set_current_error(self, status: int) -> Exception:
        """What :meth:`set_current` raises for a status, for those who called by the address."""
        return self._error("cuCtxSetCurrent", status)

    def context_id(self, context: int) -> int | None:
        """A number that no other context of the process ever has; None if it was destroyed.

        Only for a handle that was a context once: the driver does not look twice.
        """
        cell = array("Q", (0,))
        status = self._status("cuCtxGetId", 12000, context, cell.buffer_info()[0])
        if status is None:
            status, number = self.driver.cuCtxGetId(self.types.CUcontext(context))
        else:
            number = cell[0]
        if int(status) == int(self.types.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED):
            return None
        if status != 0:
            raise self._error("cuCtxGetId", status)
        return int(number)

    def api_version(self, context: int) -> int:
        return int(self._value(self.driver.cuCtxGetApiVersion, self.types.CUcontext(context)))

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
        except ValueError:  # bindings that are older than the limit
            raise self._error(
                "cuCtxGetLimit", self.types.CUresult.CUDA_ERROR_UNSUPPORTED_LIMIT
            ) from None

    def cache_config(self) -> int:
        return int(self._value(self.driver.cuCtxGetCacheConfig))

    def set_cache_config(self, config: int) -> None:
        self._value(self.driver.cuCtxSetCacheConfig, self.types.CUfunc_cache(config))

    def shared_memory_config(self) -> int:
        return int(self._value(self.driver.cuCtxGetSharedMemConfig))

    def set_shared_memory_config(self, config: int) -> None:
        self._value(self.driver.cuCtxSetSharedMemConfig, self.types.CUsharedconfig(config))

    def stream_priority_range(self) -> tuple[int, int]:
        """The least and the greatest priority; the greater is the smaller number."""
        least, greatest = self._value(self.driver.cuCtxGetStreamPriorityRange)
        return int(least), int(greatest)

    def synchronize(self) -> None:
        self._value(self.driver.cuCtxSynchronize)

    def enable_peer_access(self, peer_context: int) -> bool:
        """Whether this call enabled it: False where it was enabled already."""
        (status,) = self.driver.cuCtxEnablePeerAccess(self.types.CUcontext(peer_context), 0)
        if int(status) == int(self.types.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            return False
        if status != 0:
            raise self._error("cuCtxEnablePeerAccess", status)
        return True

    # -- events: points in the work that a device was given

    def event_create(self) -> int:
        """An event of the current context, which measures no time."""
        flag = int(self.types.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        made = self._out("cuEventCreate", 2000, 0, flag)
        return int(self._value(self.driver.cuEventCreate, flag)) if made is None else made

    def event_destroy(self, event: int) -> None:
        """What waits for it still does."""
        if not self._called("cuEventDestroy", 4000, event):
            self._value(self.driver.cuEventDestroy, self.types.CUevent(event))

    def event_record(self, event: int, stream: int) -> None:
        """Let the event mean what the stream has been given so far."""
        if not self._called("cuEventRecord", 2000, event, stream):
            self._value(
                self.driver.cuEventRecord, self.types.CUevent(event), self.types.CUstream(stream)
            )

    def event_record_context(self, event: int, context: int) -> bool:
        """Let the event mean what every stream of the context has been given so far.

        False where this is not to be had: a driver before CUDA 12.5, or a stream of the context
        is being captured into a graph.
        """
        try:
            status = self._status("cuCtxRecordEvent", 12050, context, event)
            if status is None:
                function = self.driver.cuCtxRecordEvent
                (status,) = function(self.types.CUcontext(context), self.types.CUevent(event))
        except (AttributeError, RuntimeError):  # the bindings' words for a function that is missing
            return False
        kind = self.types.CUresult
        if int(status) in (
            int(kind.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
            int(kind.CUDA_ERROR_NOT_SUPPORTED),
        ):
            return False
        if status != 0:
            raise self._error("cuCtxRecordEvent", status)
        return True

    def event_done(self, event: int) -> bool:
        status = self._status("cuEventQuery", 2000, event)
        if status is None:
            (status,) = self.driver.cuEventQuery(self.types.CUevent(event))
        if int(status) == int(self.types.CUresult.CUDA_ERROR_NOT_READY):
            return False
        if status != 0:
            raise self._error("cuEventQuery", status)
        return True

    def stream_create(self) -> int:
        """A stream of the current context, which the legacy default stream does not wait for."""
        flag = int(self.types.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._value(self.driver.cuStreamCreate, flag))

    def stream_wait(self, stream: int, event: int) -> None:
        """Let what the stream is given from now on wait for the event, of any device."""
        if not self._called("cuStreamWaitEvent", 3020, stream, event, 0):
            self._value(
                self.driver.cuStreamWaitEvent,
                self.types.CUstream(stream),
                self.types.CUevent(event),
                0,
            )

    # -- memory of the current context

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._value(self.driver.cuMemGetInfo)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        return int(self._value(self.driver.cuMemAlloc, nbytes))

    def free(self, pointer: int) -> None:
        self._value(self.driver.cuMemFree, pointer)

    def copy_peer(
        self, target: int, context: int, source: int, source_context: int, nbytes: int, stream: int
    ) -> None:
        """Enqueue a copy between two contexts' memory, through the host where it must be."""
        self._value(
            self.driver.cuMemcpyPeerAsync,
            self.types.CUdeviceptr(target),
            self.types.CUcontext(context),
            self.types.CUdeviceptr(source),
            self.types.CUcontext(source_context),
            nbytes,
            self.types.CUstream(stream),
        )

    def exchange_capture_mode(self, mode: int) -> int:
        """Set how this thread may disturb graphs that others capture; return how it was."""
        before = self._out("cuThreadExchangeStreamCaptureMode", 10010, mode)
        if before is not None:
            return before & 0xFFFFFFFF
        kind = self.types.CUstreamCaptureMode
        return int(self._value(self.driver.cuThreadExchangeStreamCaptureMode, kind(mode)))

    def probe(self) -> None:
        """Raise if an earlier kernel left a sticky error; frees nothing, waits for nothing."""
        if not self._called("cuMemFree", 3020, 0):
            self._value(self.driver.cuMemFree, 0)
