"""The links between devices: NVLink before PCIe."""

from __future__ import annotations

import weakref

from dask_devctx.cuda.device import Device
from dask_devctx.driver.backends import Backend
from dask_devctx.errors import DevctxError

_NO_ACCESS = 100

_known: weakref.WeakKeyDictionary[Backend, dict[frozenset[Device], int]] = (
    weakref.WeakKeyDictionary()
)


def link_rank(device: Device, peer: Device) -> int:
    """Return how slow the link between two devices is: 0 for the fastest links of the machine.

    Notes
    -----
    The driver is asked once for each pair; no context is created. Where it does not answer, all
    links count as equal.

    References
    ----------
    ``cuDeviceGetP2PAttribute`` with ``CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK``.

    Examples
    --------
    >>> link_rank(Device(0), Device(1))
    0
    """
    known = _known.setdefault(device._backend, {})
    pair = frozenset((device, peer))
    rank = known.get(pair)
    if rank is None:
        rank = known[pair] = _asked(device, peer)
    return rank


def _asked(device: Device, peer: Device) -> int:
    try:
        if not device.can_access_peer(peer):
            return _NO_ACCESS
        return device._backend.driver().link_rank(device._ordinal(), peer._ordinal())
    except DevctxError:
        return 0
