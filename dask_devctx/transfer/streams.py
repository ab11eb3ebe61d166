"""The streams that a thread gives its work to: the current stream of each loaded library."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dask_devctx.cuda.device import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM


def current_streams(device: Device) -> tuple[int, ...]:
    """Return the driver's handles of the streams that are current on this thread.

    Parameters
    ----------
    device
        The device of the streams; its context must be current on this thread.

    Returns
    -------
    tuple of int
        One for each different stream of the loaded libraries; the legacy default stream if no
        library names a stream. JAX does not reveal its streams and orders its own work.

    Notes
    -----
    This imports and initialises no library. Each thread has its own current streams.
    """
    ordinal = device.device_id
    # The libraries do not know simulated devices: their device of this number is another one.
    libraries = () if device._backend.simulated else _LIBRARIES
    found = dict.fromkeys(
        stream for library in libraries if (stream := library(ordinal)) is not None
    )
    return tuple(found) or (LEGACY_STREAM,)


def _cupy(ordinal: int) -> int | None:
    cuda = getattr(sys.modules.get("cupy"), "cuda", None)
    current = getattr(cuda, "get_current_stream", None)  # None while it is being imported
    return None if current is None else current(ordinal).ptr or LEGACY_STREAM


def _torch(ordinal: int) -> int | None:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    initialised = getattr(cuda, "is_initialized", None)
    if cuda is None or initialised is None or not initialised():
        return None
    return cuda.current_stream(ordinal).cuda_stream or LEGACY_STREAM


def _numba(ordinal: int) -> int | None:
    # Numba has no current stream: a launch uses the default stream if it names none.
    if "numba.cuda" not in sys.modules:
        return None
    config = getattr(sys.modules.get("numba"), "config", None)
    per_thread = getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)
    return PER_THREAD_STREAM if per_thread else LEGACY_STREAM


def cupy_stream(ordinal: int) -> int:
    """Return CuPy's current stream of a device."""
    return _cupy(ordinal) or LEGACY_STREAM


def torch_stream(ordinal: int) -> int:
    """Return torch's current stream of a device."""
    return _torch(ordinal) or LEGACY_STREAM


def numba_stream(ordinal: int) -> int:
    """Return Numba's default stream."""
    return _numba(ordinal) or LEGACY_STREAM


_LIBRARIES: tuple[Callable[[int], int | None], ...] = (_cupy, _torch, _numba)
