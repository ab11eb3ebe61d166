"""How ``CUDA_VISIBLE_DEVICES`` chooses and orders devices: a pure function.

The rule is the driver's, so it lives here. The simulated driver follows it, and
:mod:`dask_devctx.cuda.discovery` predicts the driver's devices with it.

References
----------
CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA MIG User Guide, "CUDA
Visible Devices". They leave some points open: letter case, white space, mixed kinds,
repeated devices, numbers past 32 bits. There the rule is the behaviour of driver 580.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dask_devctx.errors import counted

# strtol reads leading white space, a sign and decimal digits; the rest is ignored.
_NUMBER = re.compile(r"\s*([+-]?[0-9]+)")
UUID_KINDS = ("GPU-", "MIG-")
_UUID_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")
_LONG_MAX = 2**63 - 1


class PhysicalDevice(NamedTuple):
    """One GPU of the machine, as the visibility rule sees it."""

    uuid: str  # "GPU-…"
    mig: tuple[str, ...] = ()  # the "MIG-…" UUIDs of its instances
    mig_enabled: bool = False  # then the GPU itself can run nothing


class Visible(NamedTuple):
    """The devices that a value of ``CUDA_VISIBLE_DEVICES`` shows."""

    uuids: tuple[str, ...]  # in CUDA's order: the position is the ordinal
    stopped_at: str | None = None  # the entry that hid itself and all after it
    reason: str = ""  # why that entry did so


def visible_devices(value: str | None, devices: Sequence[PhysicalDevice]) -> Visible:
    """Return which of the machine's devices, given in ``CUDA_DEVICE_ORDER``, CUDA shows."""
    # The first entry decides whether they are indices or UUIDs, of which a unique prefix is enough.
    # One that names no device hides itself and all after it; a device named twice hides all. A GPU
    # in MIG mode is visible only through its instances, and where one is, nothing else is.
    if value is None:
        return Visible(_unset(devices))
    resolve = _by_uuid if value.startswith(UUID_KINDS) else _by_index
    chosen: list[str] = []
    for entry in value.split(","):
        found = resolve(entry, devices)
        if isinstance(found, _Unusable):
            return Visible(_one_instance(chosen, devices), entry, found.reason)
        if found in chosen:
            return Visible((), entry, "a device that is named twice hides every device")
        chosen.append(found)
    return Visible(_one_instance(chosen, devices))


class _Unusable(NamedTuple):
    reason: str


def _unset(devices: Sequence[PhysicalDevice]) -> tuple[str, ...]:
    whole = tuple(device.uuid for device in devices if not device.mig_enabled)
    return whole or tuple(uuid for device in devices for uuid in device.mig)[:1]


def _by_uuid(entry: str, devices: Sequence[PhysicalDevice]) -> str | _Unusable:
    if not entry.startswith(UUID_KINDS):
        return _Unusable("it is not a UUID, as the first entry is")
    # Letter case does not matter, and any text after a whole UUID is ignored.
    prefix = entry[:_UUID_LENGTH].rstrip().lower()
    known = [d.uuid for d in devices] + [uuid for d in devices for uuid in d.mig]
    found = [uuid for uuid in known if uuid.lower().startswith(prefix)]
    if not found:
        return _Unusable("no device has this UUID")
    if len(found) > 1:
        return _Unusable("several devices have this prefix")
    parent = next((device for device in devices if device.uuid == found[0]), None)
    return found[0] if parent is None else _whole_or_first_instance(parent)


def _by_index(entry: str, devices: Sequence[PhysicalDevice]) -> str | _Unusable:
    number = _NUMBER.match(entry)
    if not entry:
        return _Unusable("it is empty")
    if number is None:
        return _Unusable("it is not an index, as the first entry is")
    wide = max(-_LONG_MAX - 1, min(_LONG_MAX, int(number[1])))
    index = (wide + 2**31) % 2**32 - 2**31  # a C long that is stored in a C int
    if not 0 <= index < len(devices):
        return _Unusable(f"the machine has {counted(len(devices), 'device')}")
    return _whole_or_first_instance(devices[index])


def _whole_or_first_instance(device: PhysicalDevice) -> str | _Unusable:
    if not device.mig_enabled:
        return device.uuid
    return device.mig[0] if device.mig else _Unusable("it is in MIG mode without an instance")


def _one_instance(chosen: list[str], devices: Sequence[PhysicalDevice]) -> tuple[str, ...]:
    instances = {uuid for device in devices for uuid in device.mig}
    return next(((uuid,) for uuid in chosen if uuid in instances), tuple(chosen))
