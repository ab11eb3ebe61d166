"""The streams that a thread gives its work to: the current stream of each loaded library."""

from __future__ import annotations

import sys

from dask_devctx.cuda.device import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM


def current_streams(device: Device) -> tuple[int, ...]:
    """Return the handles of the current streams of this thread and device, which is current.

    There is one for each different stream of the loaded libraries, the legacy default stream if no
    library names one. No library is imported or initialised.
    """
    # The libraries do not know simulated devices: their device of this number is another one.
    # JAX does not reveal its streams and orders its own work.
    if device._backend.simulated:
        return (LEGACY_STREAM,)
    asked = [ask(device.device_id) for ask in (cupy_stream, torch_stream, numba_stream)]
    return tuple(dict.fromkeys(stream for stream in asked if stream)) or (LEGACY_STREAM,)


def cupy_stream(ordinal: int) -> int:
    """Return CuPy's current stream of a device; 0 if CuPy is not loaded."""
    cuda = getattr(sys.modules.get("cupy"), "cuda", None)
    current = getattr(cuda, "get_current_stream", None)  # None while it is being imported
    return 0 if current is None else current(ordinal).ptr or LEGACY_STREAM


def torch_stream(ordinal: int) -> int:
    """Return torch's current stream of a device; 0 if torch does not use CUDA yet."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    initialised = getattr(cuda, "is_initialized", None)
    if cuda is None or initialised is None or not initialised():
        return 0
    return cuda.current_stream(ordinal).cuda_stream or LEGACY_STREAM


def numba_stream(ordinal: int = 0) -> int:
    """Return the stream of Numba's launches that name none; 0 if Numba is not loaded."""
    if "numba.cuda" not in sys.modules:
        return 0
    config = getattr(sys.modules.get("numba"), "config", None)
    per_thread = getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)
    return PER_THREAD_STREAM if per_thread else LEGACY_STREAM
