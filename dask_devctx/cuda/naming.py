"""From what somebody calls a device to the device: names are read here and nowhere else."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Final

from dask_devctx.cuda.inventory import DeviceInfo, Inventory
from dask_devctx.errors import DeviceNotFoundError

ACCEPTED = (
    'an ordinal (1, "1", "cuda:1"), a UUID or a unique prefix of one ("GPU-…", "MIG-…"), a PCI '
    "bus id, a Device, or a device object of torch, CuPy, Numba, JAX or cuda.core"
)
# An annotation may also say "any device" and "none". The scheduler drops a layer's annotation
# that is None; "none" says the same and arrives.
AUTO: Final = "auto"
NO_DEVICE: Final = "none"

# torch's names of the device that is current.
CURRENT: Final = frozenset({"cuda", "gpu"})

# Where Device is, which a scheduler need not import to read names.
_OURS: Final = "dask_devctx.cuda.device"

_ORDINAL = re.compile(r"(?:(?:cuda|gpu):)?([0-9]{1,9})")
_PCI_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f][0-9a-f-]*", re.IGNORECASE)
# Without what it is a UUID of, as torch's properties and cuda.core write it; whole ones only.
_BARE_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def find(which: object, inventory: Inventory) -> DeviceInfo | None:
    """Return the device that ``which`` names; None where it names the current one.

    Parameters
    ----------
    which
        What :class:`~dask_devctx.Device` accepts.
    inventory
        The devices to choose from.

    Raises
    ------
    DeviceNotFoundError
        It has the right form, and there is no such device, or several.
    TypeError
        It is no way to name a device.
    """
    if isinstance(which, str):
        return _by_name(which, inventory)
    # Asked of the object, which may be a proxy: Numba hands its devices out as such.
    module = str(which.__class__.__module__)
    if module == _OURS:
        return _by_uuid(which.uuid, inventory)  # type: ignore[attr-defined]
    foreign = _FOREIGN.get(module.partition(".")[0])
    if foreign is not None:
        return _by_foreign(which, foreign, inventory)
    if isinstance(which, bool):
        raise _not_a_name(which)
    try:
        ordinal = operator.index(which)  # type: ignore[arg-type]
    except TypeError:
        raise _not_a_name(which) from None
    return _by_ordinal(ordinal, which, inventory)


def not_found(which: object, inventory: Inventory, hint: str = "") -> DeviceNotFoundError:
    """Return the error for a device that is not there."""
    available = [str(info) for info in inventory.devices]
    if inventory.source == "nvml":  # what is wrong may be why: an entry that hides it, a lost GPU
        hint = ". ".join(filter(None, [hint, *inventory.problems]))
    return DeviceNotFoundError(which, available, inventory.visible_devices, hint)


def _not_a_name(which: object) -> TypeError:
    return TypeError(f"a device is {ACCEPTED}; got {which!r} of type {type(which).__name__}")


def _by_ordinal(ordinal: int, which: object, inventory: Inventory) -> DeviceInfo:
    if 0 <= ordinal < len(inventory.devices):
        return inventory.devices[ordinal]
    count = len(inventory.devices)
    hint = f"Ordinals go from 0 to {count - 1}" if count else "CUDA shows this process no device"
    raise not_found(which, inventory, hint)


def _by_name(name: str, inventory: Inventory) -> DeviceInfo | None:
    if name in CURRENT:
        return None
    if match := _ORDINAL.fullmatch(name):
        return _by_ordinal(int(match[1]), name, inventory)
    if _UUID.fullmatch(name) or _BARE_UUID.fullmatch(name):
        return _by_uuid(name, inventory)
    if match := _PCI_BUS_ID.fullmatch(name):
        wanted = f"{int(match[1] or '0', 16):04x}:{match[2].lower()}"
        for info in inventory.devices:
            if info.pci_bus_id == wanted:
                return info
        raise not_found(name, inventory, "No visible device has this PCI bus id")
    hint = f"A device is {ACCEPTED}"
    if name in (AUTO, NO_DEVICE):
        hint = f"{name!r} is for annotations alone: dask.annotate(device={name!r}). {hint}"
    raise not_found(name, inventory, hint)


def _by_uuid(name: str, inventory: Inventory) -> DeviceInfo:
    wanted = name.lower()
    start = 0 if wanted.startswith(("gpu-", "mig-")) else len("GPU-")

    def matches(devices: tuple[DeviceInfo, ...]) -> list[DeviceInfo]:
        return [info for info in devices if info.uuid.lower().startswith(wanted, start)]

    found = matches(inventory.devices)
    if len(found) == 1:
        return found[0]
    if found:
        raise not_found(name, inventory, f"{len(found)} devices have this prefix: add digits")
    hint = (
        "This machine has it, and CUDA_VISIBLE_DEVICES hides it from this process"
        if matches(inventory.hidden)
        else "No device of this machine has this UUID"
    )
    raise not_found(name, inventory, hint)


def _by_foreign(
    which: object, ordinal_of: Callable[[Any], int | None], inventory: Inventory
) -> DeviceInfo | None:
    try:
        ordinal = ordinal_of(which)
    except (AttributeError, TypeError):
        raise _not_a_name(which) from None
    except LookupError:
        raise not_found(which, inventory, "It is not a CUDA device") from None
    return None if ordinal is None else _by_ordinal(ordinal, which, inventory)


def _torch_ordinal(device: Any) -> int | None:
    if not isinstance(device.type, str):  # a tensor's is a method
        raise TypeError(device)
    if device.type != "cuda":
        raise LookupError(repr(device))  # the object itself may not travel
    return None if device.index is None else operator.index(device.index)


def _jax_ordinal(device: Any) -> int:
    if device.platform not in ("gpu", "cuda"):
        raise LookupError(repr(device))  # the object itself may not travel
    return operator.index(device.local_hardware_id)


def _cupy_ordinal(device: Any) -> int:
    return operator.index(device.id)


def _numba_ordinal(device: Any) -> int:
    return int(device.id)  # a CUdevice, which is a number to int() alone


# By the first part of the module that defines the object's class: nothing is imported.
_FOREIGN: dict[str, Callable[[Any], int | None]] = {
    "torch": _torch_ordinal,
    "cupy": _cupy_ordinal,
    "numba": _numba_ordinal,
    "jaxlib": _jax_ordinal,
    "jax": _jax_ordinal,
    "cuda": lambda device: operator.index(device.device_id),
}
