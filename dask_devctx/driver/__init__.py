"""The one door to the CUDA driver and to NVML.

:func:`backend` gives the pair that this process uses, chosen at first use: the real ones, or
the simulated ones where ``DASK_DEVCTX__SIMULATED_DEVICES`` (in dask's configuration
``devctx.simulated-devices``) asks for them. By default nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dask_devctx.driver import settings
from dask_devctx.driver.backends import SIMULATED_DEVICES_VARIABLE, Backend, real
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.errors import DriverUnavailableError

__all__ = ["SIMULATED_DEVICES_VARIABLE", "backend", "current_backend", "use"]

_active: Backend | None = None
_real: Backend | None = None  # the machine's own, once it was chosen
_lock = ProcessLock()


def backend() -> Backend:
    """Return the driver and NVML that this process uses; the first call chooses them."""
    # Chosen once, on any thread; CUDA and NVML are not initialised. Where the machine turns out to
    # have no driver, a later setting of simulated devices still counts.
    chosen = _active
    return _choose() if chosen is None or chosen.unavailable else chosen


def current_backend() -> Backend | None:
    """Return the driver and NVML that :func:`backend` chose; None before its first call."""
    return _active


@contextmanager
def use(other: Backend) -> Iterator[Backend]:
    """Make this process use another driver and NVML inside the ``with`` block.

    It is for a program with a driver of its own, such as one that simulates several machines.
    Devices made inside belong to ``other`` and mean nothing outside.

    Notes
    -----
    The change applies to the whole process, not only to the calling thread.
    """
    global _active
    before, _active = _active, other
    try:
        yield other
    finally:
        _active = before


def _choose() -> Backend:
    global _active, _real
    with _lock:
        chosen = _active
        if chosen is not None and chosen is not _real:
            return chosen
        if chosen is None:
            settings.warn_of_unknown_variables()
        count = settings.simulated_devices()
        if chosen is not None and not count:
            return chosen
        try:
            chosen = _simulated(count) if count else real()
        except ImportError as error:
            raise DriverUnavailableError(
                f"cuda-bindings and nvidia-ml-py cannot be loaded: {error}",
                "Install both for this Python. A subinterpreter cannot load cuda-bindings: use "
                "the main interpreter, or a process",
            ) from error
        if _active is None or _active is _real:  # else a signal handler has chosen meanwhile
            _active, _real = chosen, None if count else chosen
        return _active


def _simulated(count: int) -> Backend:
    from dask_devctx.driver.simulated import SimulatedMachine

    return SimulatedMachine(count, total_memory=settings.simulated_memory()).backend()
