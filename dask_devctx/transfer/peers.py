"""Direct access between devices, switched on once per pair, and the copy that uses it."""

from __future__ import annotations

import logging
import threading
import weakref

from dask_devctx.device import Device
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DriverError

logger = logging.getLogger(__name__)

_pairs: weakref.WeakKeyDictionary[Backend, dict[tuple[str, str], bool]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def connect(device: Device, peer: Device) -> bool:
    """Let ``device`` reach the memory of ``peer`` and back; return whether it does.

    Notes
    -----
    Asked of the driver once per pair and process. Where the machine has no such path the answer
    is False, and copies go through the host.

    References
    ----------
    ``cuDeviceCanAccessPeer``, ``cuCtxEnablePeerAccess``.
    """
    with _lock:
        known = _pairs.setdefault(device._backend, {})
        found = known.get((device.uuid, peer.uuid))
        if found is None:
            found = _enable(device, peer) and _enable(peer, device)
            known[device.uuid, peer.uuid] = known[peer.uuid, device.uuid] = found
    return found


def _enable(device: Device, peer: Device) -> bool:
    if not device.can_access_peer(peer):
        return False
    try:
        context = peer.primary_context.handle
        with device:
            device._backend.calls.enable_peer_access(context)
    except DriverError as error:  # such as too many peers: slower, and still right
        logger.info("%s does not reach %s directly: %s", device, peer, error)
        return False
    return True


def copy_bytes(
    target: int, device: Device, source: int, source_device: Device, nbytes: int, stream: int
) -> None:
    """Enqueue a copy of memory from one device to another.

    Parameters
    ----------
    target, source
        The addresses, of ``device`` and of ``source_device``, which may be the same.
    stream
        A stream of ``device``, whose context is current on this thread.

    References
    ----------
    ``cuMemcpyPeerAsync``.
    """
    if nbytes:
        device._backend.calls.copy_peer(
            target,
            device.primary_context.handle,
            source,
            source_device.primary_context.handle,
            nbytes,
            stream,
        )
