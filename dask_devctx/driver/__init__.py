"""The one door to the CUDA driver and to NVML.

:func:`backend` gives the pair that this process uses, chosen at first use: the real ones, or
the simulated ones where ``DASK_DEVCTX__SIMULATED_DEVICES`` (in dask's configuration
``devctx.simulated-devices``) asks for them. By default nothing is simulated.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dask_devctx.driver.backends import SIMULATED_DEVICES_VARIABLE, Backend, ProcessLock, real
from dask_devctx.errors import DriverUnavailableError, variable

__all__ = ["SIMULATED_DEVICES_VARIABLE", "backend", "current_backend", "use"]

# The variables as dask read them, if it was imported first; they may change afterwards.
_AT_IMPORT: Final = {
    name: text for name, text in os.environ.items() if name.startswith(variable(""))
}
_SIZE: Final = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?", re.IGNORECASE)

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
        count = simulated_devices()
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

    return SimulatedMachine(count, total_memory=simulated_memory()).backend()


# -- settings of simulated devices: the environment, and dask's configuration if it is loaded


def simulated_devices() -> int:
    """Return how many devices are simulated; 0 where the real ones are used."""
    value = _configured("simulated-devices", 0)
    try:
        count = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):  # the last one is for infinity
        count = -1
    if isinstance(value, (bool, float)) or count < 0:
        raise DriverUnavailableError(
            f"devctx.simulated-devices must be a number of devices, 0 or more, got {value!r}",
            f"Set or unset {SIMULATED_DEVICES_VARIABLE}",
        )
    return int(count)


def simulated_memory() -> int:
    """Return how many bytes each simulated device has."""
    value = _configured("simulated-memory", "16 GiB")
    nbytes = 0 if isinstance(value, bool) else _nbytes(str(value))
    if nbytes < 1:
        raise DriverUnavailableError(
            f"devctx.simulated-memory must be a size such as '16 GiB', got {value!r}",
            f"Set or unset {variable('simulated-memory')}",
        )
    return nbytes


def _nbytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return 0
    number, prefix, binary = found.groups(default="")
    factor = (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError):
        return 0


def _configured(key: str, default: object) -> object:
    name, value = variable(key), None
    if "dask.config" in sys.modules:
        value = sys.modules["dask.config"].get(f"devctx.{key}", None)
    # dask reads the variable when it is imported, and keeps an empty one as "".
    if value is None or str(value) in ("", _AT_IMPORT.get(name)):
        return os.environ.get(name) or default
    return value
