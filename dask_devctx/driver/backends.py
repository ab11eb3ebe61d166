"""A driver and an NVML that belong together."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from dask_devctx.driver.calls import Calls
from dask_devctx.errors import DevctxError, DriverError, DriverUnavailableError

if TYPE_CHECKING:
    from dask_devctx.driver._scope import Native

# The environment variable with the number of GPUs to simulate.
SIMULATED_DEVICES_VARIABLE: Final = "DASK_DEVCTX__SIMULATED_DEVICES"

_REMEDY = (
    "Install NVIDIA's driver where the GPUs are, or set "
    f"{SIMULATED_DEVICES_VARIABLE}=4 to run on simulated devices"
)


class Backend:
    """A driver, the NVML of the same machine, and whether this process initialised them."""

    def __init__(self, driver: Any, nvml: Any, machine: Any = None) -> None:
        self.nvml = nvml
        self.machine = machine
        self.simulated = machine is not None
        self.calls = Calls(driver)
        self.initialised = False
        self.unavailable = False  # until a later attempt succeeds
        # Handles that are always safe to make current: 0 for no context, and the primary contexts
        # that this process retains. Any other context may be destroyed before it is restored.
        self.lasting: set[int] | Native = {0}
        # The same set in the extension, with the addresses of the functions that scopes call. None
        # before cuInit, and where there are no addresses.
        self.native: Native | None = None
        # The ids of the contexts that this process destroyed itself, so that the driver is not
        # asked about their handles again.
        self.destroyed: set[int | None] = set()
        # One Device per GPU, by UUID. They are kept here to live as long as their driver.
        self.devices: dict[str, Any] = {}
        # The same by ordinal. Empty until CUDA is initialised, which fixes the ordinals.
        self.ordinals: dict[int, Any] = {}
        # The devices of the machine, by the environment's values.
        self.inventories: dict[tuple[str | None, str | None], Any] = {}
        # Whether two contexts reach each other's memory, by the pair of their numbers.
        self.peers: dict[frozenset[int | None], bool] = {}
        # The contexts that are owned or borrowed, by their numbers: a driver uses handles again.
        self.contexts: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # The environment's values when this process initialised CUDA. CUDA reads them once.
        self.environment: tuple[str | None, str | None] | None = None
        self._uuids: tuple[str, ...] = ()
        self._lock = ProcessLock()
        _backends.add(self)

    def driver(self) -> Calls:
        """Return the driver's calls, after ``cuInit``; without one a DriverUnavailableError."""
        if not self.initialised:
            with self._lock:
                if not self.initialised:
                    self.unavailable = True
                    self._initialise()
                    self.unavailable = False
        return self.calls

    def _initialise(self) -> None:
        try:
            self.calls.init()
        except DriverUnavailableError:
            raise
        except DriverError as error:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            seen = "" if visible is None else f", with CUDA_VISIBLE_DEVICES={visible!r}"
            raise DriverUnavailableError(
                f"the CUDA driver does not start: {error}{seen}", _REMEDY
            ) from error
        except Exception as error:  # the bindings' errors for a missing library vary
            raise DriverUnavailableError(f"there is no CUDA driver: {error}", _REMEDY) from error
        if self.initialised:  # by a signal handler, meanwhile
            return
        self.environment = environment()
        native = _native(self.calls)
        if native is not None:
            self.lasting = self.native = native  # no handle was retained before cuInit
        self.initialised = True

    def uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the driver's devices by their ordinals, without a prefix."""
        # Asked once: the devices are fixed when the driver is initialised.
        calls = self.driver()
        if not self._uuids:
            self._uuids = tuple(str(calls.device_uuid(n)) for n in range(calls.device_count()))
        return self._uuids

    def current_context(self) -> int:
        """Return the context that is current on this thread; 0 for none. Initialises nothing."""
        if self.initialised:
            return self.calls.current()  # which keeps the GIL
        try:
            return self.calls.current_or_uninitialised()
        except DevctxError:
            raise
        except Exception:  # no driver: the bindings' errors for a missing library vary
            return 0


def environment() -> tuple[str | None, str | None]:
    """Return the values of ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")


def _native(calls: Calls) -> Native | None:
    """Return a driver's addresses for the extension; None where either is missing."""
    names = "cuCtxGetCurrent", "cuCtxSetCurrent"
    get_current, set_current = map(calls.checked.address, names)
    if not (get_current and set_current):
        return None
    from dask_devctx.driver._scope import Native

    return Native(get_current, set_current)


def real() -> Backend:
    """Return the machine's own driver and NVML; neither library is loaded yet."""
    import pynvml
    from cuda.bindings import driver

    return Backend(driver, pynvml)


class ProcessLock:
    """A reentrant lock that works in a forked process, whichever thread held it at the fork."""

    # A fork copies one thread only: what another thread holds would never be released in the child.
    # Reentrant: a signal handler or a `__del__` may need it while this thread holds it.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


_backends: weakref.WeakSet[Backend] = weakref.WeakSet()
_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _locks:
        if lock._lock.acquire(blocking=False):  # free, or held by this thread
            lock._lock.release()
        else:
            lock._lock = threading.RLock()
    # In the child of a process that used the driver, it always answers NOT_INITIALIZED.
    for backend in _backends:
        if backend.initialised:
            backend.calls.checked.forked = True


os.register_at_fork(after_in_child=_after_fork)
