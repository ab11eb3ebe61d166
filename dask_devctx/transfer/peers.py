"""Direct access between devices, switched on once per pair, and the copy that uses it."""

from __future__ import annotations

import logging
import weakref

from dask_devctx.cuda.device import Device
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.process_lock import ProcessLock
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.errors import DeviceMemoryError, DriverError
from dask_devctx.transfer.events import Event
from dask_devctx.transfer.timing import timed

logger = logging.getLogger(__name__)

_pairs: weakref.WeakKeyDictionary[Backend, dict[frozenset[int | None], bool]] = (
    weakref.WeakKeyDictionary()
)
_lock = ProcessLock()  # a ``__del__`` may copy, too


def connect(device: Device, peer: Device) -> bool:
    """Give ``device`` and ``peer`` access to each other's memory; return whether this worked.

    Notes
    -----
    This asks the driver once per pair of contexts, and again where memory was short. On a machine
    without such a path the answer is False, and copies go through the host.

    References
    ----------
    ``cuDeviceCanAccessPeer``, ``cuCtxEnablePeerAccess``.
    """
    calls = device._backend.calls
    # A primary context that was released comes back with its old handle but without its peers.
    pair = frozenset(calls.context_id(each.primary_context.handle) for each in (device, peer))
    with _lock:
        known = _pairs.setdefault(device._backend, {})
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
    """Enqueue a copy of memory from one device to another.

    Parameters
    ----------
    target, source
        The addresses, on ``device`` and on ``source_device``; both may be the same device.
    stream
        A stream of ``device``, whose context is current on this thread.

    Notes
    -----
    The copy comes after all earlier work of the stream, and before all later work.

    References
    ----------
    ``cuMemcpyPeerAsync``.
    """
    if not nbytes:
        return
    calls = device._backend.calls.work
    own = device.primary_context.handle
    way = stream
    if stream == LEGACY_STREAM:
        # In this stream, a copy between devices waits for all work of both and delays all later
        # work of both.
        way = _copy_stream(device)
        Event(device).record(stream).holds_back(way)
    with timed(device, source_device, nbytes, way):
        calls.copy_peer(target, own, source, source_device.primary_context.handle, nbytes, way)
    if way != stream:
        Event(device).record(way).holds_back(stream)


def _copy_stream(device: Device) -> int:
    """Return the stream for copies to a device; kept as long as its context."""
    context = device.primary_context
    with _lock:
        streams = _copy_streams.setdefault(device._backend, {})
        known = streams.get(context.handle)
        identity = device._backend.calls.context_id(context.handle)
        if known is None or known[0] != identity:  # a primary context can end and start again
            known = streams[context.handle] = identity, device._backend.calls.work.stream_create()
    return known[1]


_copy_streams: weakref.WeakKeyDictionary[Backend, dict[int, tuple[int | None, int]]] = (
    weakref.WeakKeyDictionary()
)
