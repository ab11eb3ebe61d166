"""A driver and an NVML that belong together."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

from dask_devctx.driver.calls import Calls
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.errors import DevctxError, DriverError, DriverUnavailableError

if TYPE_CHECKING:
    from dask_devctx.driver._scope import Native
    from dask_devctx.driver.protocol import Driver, Nvml

# How many GPUs to simulate, in the environment.
SIMULATED_DEVICES_VARIABLE: Final = "DASK_DEVCTX__SIMULATED_DEVICES"

_REMEDY = (
    "Install NVIDIA's driver where the GPUs are, or set "
    f"{SIMULATED_DEVICES_VARIABLE}=4 to run on simulated devices"
)


class Handles(Protocol):
    """A set of context handles."""

    def add(self, handle: int, /) -> None: ...
    def discard(self, handle: int, /) -> None: ...
    def __contains__(self, handle: object, /) -> bool: ...


class Backend:
    """A driver, the NVML of the same machine, and whether this process initialised them.

    Parameters
    ----------
    driver
        ``cuda.bindings.driver``, or an object with its functions.
    nvml
        ``pynvml``, or an object with its functions.
    machine
        The simulated machine, or None where the devices are real.
    """

    def __init__(self, driver: Driver, nvml: Nvml, machine: Any = None) -> None:
        self.nvml = nvml
        self.machine = machine
        self.calls = Calls(driver)
        self.initialised = False
        # Handles that stay safe to make current: none at all, and the primary contexts that this
        # process retains. Any other context may be destroyed while it waits to be restored.
        self.lasting: Handles = {0}
        # The same, with the addresses that scopes call; None until cuInit, or without addresses.
        self.native: Native | None = None
        # The numbers of contexts that this process destroyed itself: the driver need not be shown
        # their handles again to know it.
        self.destroyed: set[int] = set()
        # One Device per GPU, by UUID; kept here so that they live and die with their driver.
        self.devices: dict[str, Any] = {}
        # The same by ordinal, once CUDA is initialised: what an ordinal means is settled then.
        self.ordinals: dict[int, Any] = {}
        # What the environment said when this process initialised CUDA, which reads it once.
        self.environment: tuple[str | None, str | None] | None = None
        self._uuids: tuple[str, ...] = ()
        self._lock = ProcessLock()
        _backends.add(self)

    @property
    def simulated(self) -> bool:
        return self.machine is not None

    def driver(self) -> Calls:
        """Return the driver's calls, after ``cuInit``.

        Raises
        ------
        DriverUnavailableError
            There is no driver, or it shows this process no device.
        """
        if not self.initialised:
            with self._lock:
                if not self.initialised:
                    self._initialise()
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
        except Exception as error:  # the bindings' own words for a missing library vary
            raise _no_driver(error) from error
        if self.initialised:  # by what interrupted this
            return
        self.environment = environment()
        native = _native(self.calls)
        if native is not None:
            self.lasting = self.native = native  # no handle was retained before cuInit
        self.initialised = True

    def uuids(self) -> tuple[str, ...]:
        """Return the bare UUIDs that the driver shows: the position is the ordinal.

        Raises
        ------
        DriverUnavailableError
            There is no driver, or it shows this process no device.

        Notes
        -----
        Asked once: what the driver shows is settled when it is initialised.
        """
        calls = self.driver()
        if not self._uuids:
            self._uuids = tuple(str(calls.device_uuid(n)) for n in range(calls.device_count()))
        return self._uuids

    def current_context(self) -> int:
        """Return the context that is current on this thread, without initialising anything.

        0 where there is none, so also before anything in this process has used CUDA, and on a
        machine without a driver.

        Raises
        ------
        DriverError
            The driver does not answer.
        ForkedProcessError
            This process was forked after CUDA was initialised.
        """
        try:
            return self.calls.current_or_uninitialised()
        except DevctxError:
            raise
        except Exception:  # there is no driver: the bindings' own words for a missing library vary
            return 0


def environment() -> tuple[str | None, str | None]:
    """Return the values of ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")


def _native(calls: Calls) -> Native | None:
    """What the extension needs of a driver, where both are there."""
    try:
        from dask_devctx.driver._scope import Native
    except ImportError:
        return None
    get_current, set_current = calls.current_address(), calls.set_current_address()
    return Native(get_current, set_current) if get_current and set_current else None


def _no_driver(error: Exception) -> DriverUnavailableError:
    return DriverUnavailableError(f"there is no CUDA driver: {error}", _REMEDY)


_backends: weakref.WeakSet[Backend] = weakref.WeakSet()


def _mark_forked() -> None:
    # The driver answers NOT_INITIALIZED for ever in the child of a process that used it.
    for backend in _backends:
        if backend.initialised:
            backend.calls.checked.forked = True


os.register_at_fork(after_in_child=_mark_forked)


def real() -> Backend:
    """The machine's own driver and NVML; loads neither library yet."""
    import pynvml
    from cuda.bindings import driver

    return Backend(driver, pynvml)
