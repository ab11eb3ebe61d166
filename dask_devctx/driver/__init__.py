"""The one door to the CUDA driver and to NVML.

:func:`backend` gives the pair that this process uses, chosen at first use: the real ones, or
the simulated ones where ``DASK_DEVCTX__SIMULATED_DEVICES`` (in dask's configuration
``devctx.simulated-devices``) asks for them. Nothing is simulated that nobody asked for.
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
_lock = ProcessLock()


def backend() -> Backend:
    """Return the driver and NVML that this process uses; the first call chooses them.

    Raises
    ------
    DriverUnavailableError
        ``devctx.simulated-devices`` is no count, ``devctx.simulated-memory`` is no size, or
        ``cuda-bindings`` or ``nvidia-ml-py`` cannot be loaded.

    Notes
    -----
    Chooses once per process, from any thread. Initialises nothing.
    """
    return _active or _choose()


def current_backend() -> Backend | None:
    """Return what :func:`backend` has chosen, or None where nothing has asked it yet."""
    return _active


@contextmanager
def use(other: Backend) -> Iterator[Backend]:
    """Make this process use another driver and NVML inside the ``with`` block.

    For a program that brings its own driver, such as one that simulates several machines.
    Devices made inside belong to ``other`` and mean nothing outside.

    Notes
    -----
    For the whole process, not for the calling thread.
    """
    global _active
    before, _active = _active, other
    try:
        yield other
    finally:
        _active = before


def _choose() -> Backend:
    global _active
    with _lock:
        if _active is None:
            count = settings.simulated_devices()
            try:
                chosen = _simulated(count) if count else real()
            except ImportError as error:
                raise DriverUnavailableError(
                    f"cuda-bindings and nvidia-ml-py cannot be loaded: {error}",
                    "Install both for this Python. A subinterpreter cannot load cuda-bindings: use "
                    "the main interpreter, or a process",
                ) from error
            _active = _active or chosen  # what interrupted this may have asked, too
        return _active


def _simulated(count: int) -> Backend:
    from dask_devctx.driver.simulated.machine import SimulatedMachine

    return SimulatedMachine(count, total_memory=settings.simulated_memory()).backend()
