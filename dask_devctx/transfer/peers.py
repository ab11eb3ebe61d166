"""Direct access between devices, switched on once per pair, and the copy that uses it."""

from __future__ import annotations

import logging
from typing import Any

from dask_devctx.cuda.device import Device
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.errors import DeviceMemoryError, DriverError
from dask_devctx.transfer.events import Event
from dask_devctx.transfer.ipc import lanes
from dask_devctx.transfer.traffic import timed

logger = logging.getLogger(__name__)

_lock = ProcessLock()  # a ``__del__`` may copy, too


def connect(device: Device, peer: Device) -> bool:
    """Give two devices access to each other's memory; False where copies go through the host."""
    calls = device._backend.calls
    # A primary context that was released comes back with its old handle but without its peers.
    pair = frozenset(calls.context_id(each.primary_context.handle) for each in (device, peer))
    with _lock:
        known = device._backend.peers
        found = known.get(pair)
        if found is None:
            try:
                found = known[pair] = _enable(device, peer) and _enable(peer, device)
            except DeviceMemoryError:  # later, there may be enough
                return False
    return found


def _enable(device: Device, peer: Device) -> bool:
    if not device.can_access_peer(peer):
        return False
    try:
        context = peer.primary_context.handle
        with device:
            device._backend.calls.enable_peer_access(context)
    except DriverError as error:  # too many peers, for example: copies are slower, but correct
        logger.info("%s does not reach %s directly: %s", device, peer, error)
        if isinstance(error, DeviceMemoryError):
            raise
        return False
    return True


def copy_bytes(
    target: int, device: Device, source: int, source_device: Device, nbytes: int, stream: int
) -> None:
    """Enqueue a copy from one device to another, in a stream of ``device``, which is current."""
    if not nbytes:
        return
    own, other = device.primary_context.handle, source_device.primary_context.handle
    way = stream
    if stream == LEGACY_STREAM:
        # In this stream, a copy between devices waits for all work of both and delays all later
        # work of both.
        way = lanes.shared(device, "moves")._stream
        Event(device).record(stream).holds_back(way)
    with timed(device, source_device, nbytes, way):
        device._backend.calls.work.copy_peer(target, own, source, other, nbytes, way)
    if way != stream:
        Event(device).record(way).holds_back(stream)


def is_dense(strides: Any, shape: Any, itemsize: int = 1) -> bool:
    """Return whether an array's elements fill a stretch of memory in some order of the axes."""
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1:
            if stride != itemsize:
                return 0 in shape
            itemsize *= length
    return True
