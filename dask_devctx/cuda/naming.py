"""The devices as plain data, and from a user's name, such as ``"cuda:1"``, to one of them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from dask_devctx.errors import DeviceNotFoundError, no_device

ACCEPTED = (
    'an ordinal (1, "1", "cuda:1"), a UUID or a unique prefix of one ("GPU-…", "MIG-…"), a PCI '
    "bus id, a Device, or a device object of torch, CuPy, Numba, JAX or cuda.core"
)
# An annotation may also say "any device" and "none". The scheduler drops a layer's annotation
# that is None; "none" says the same and arrives.
AUTO: Final = "auto"
NO_DEVICE: Final = "none"

# Words for the host, which is no device.
_HOST: Final = re.compile(r"(?:cpu|host)(?::[0-9]+)?", re.IGNORECASE)

# torch's names of the current device.
CURRENT: Final = frozenset({"cuda", "gpu"})

# The module of Device: a scheduler reads names without importing it.
_OURS: Final = "dask_devctx.cuda.device"

_ORDINAL = re.compile(r"(?:(?:cuda|gpu):)?([0-9]{1,9})")
_PCI_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f][0-9a-f-]*", re.IGNORECASE)
# A whole UUID without the prefix "GPU-", as torch's properties and cuda.core write it.
_BARE_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class DeviceInfo(NamedTuple):
    """One device, as found. A field is None if its value is unknown."""

    device_id: int  # CUDA's ordinal, after CUDA_VISIBLE_DEVICES; -1 for a hidden device
    uuid: str  # "GPU-…", or "MIG-…" for an instance: the identity that joins NVML and CUDA
    name: str | None = None
    pci_bus_id: str | None = None  # "0000:00:06.0", as CUDA writes it
    compute_capability: tuple[int, int] | None = None
    total_memory: int | None = None  # bytes
    nvml_index: int | None = None  # of the GPU; NVML ignores CUDA_VISIBLE_DEVICES
    cpu_affinity: frozenset[int] | None = None  # the CPUs near the GPU, by their numbers

    def __str__(self) -> str:
        return f"cuda:{self.device_id} ({self.uuid})"


class Inventory(NamedTuple):
    """The devices of this machine, and how they were found."""

    devices: tuple[DeviceInfo, ...]  # in CUDA's order: the position is the ordinal
    hidden: tuple[DeviceInfo, ...] = ()  # by CUDA_VISIBLE_DEVICES
    visible_devices: str | None = None  # the value of the variable that applies
    problems: tuple[str, ...] = ()  # in words for a person
    lost: tuple[str, ...] = ()  # those about a GPU that NVML knows and cannot reach


class Name(NamedTuple):
    """A device's name after reading; it does not depend on the machine."""

    kind: Literal["ordinal", "uuid", "pci", "current", "unknown"]
    # The ordinal; the UUID or a prefix of it in lower case; the PCI bus id; for an unknown name,
    # the reason why it names no device.
    value: int | str = ""


def read(which: object) -> Name:
    """Return the meaning of a name; two spellings of one name give equal results."""
    if isinstance(which, str):
        return _read_text(which)
    # The object's own __class__, because it may be a proxy: Numba hands out its devices as proxies.
    module = str(which.__class__.__module__)
    if module == _OURS:
        return Name("uuid", which.uuid.lower())  # type: ignore[attr-defined]
    foreign = _FOREIGN.get(module.partition(".")[0])
    if foreign is not None:
        return _read_foreign(which, foreign)
    if isinstance(which, bool):
        raise _not_a_name(which)
    try:
        return Name("ordinal", operator.index(which))  # type: ignore[arg-type]
    except TypeError:
        raise _not_a_name(which) from None


def listed(text: str) -> list[int | str]:
    """Return the names in a text such as ``"0,1"``, which is no name itself; else none."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < 2 or any(not part or read(part).kind == "unknown" for part in parts):
        return []
    return [int(part) if part.isdecimal() else part for part in parts]


def refuse_no_name(which: object) -> None:
    """Refuse a text that names no device on any machine, and an object of another type."""
    name = read(which)
    if name.kind == "unknown":
        raise DeviceNotFoundError(f"{which!r} names no device. {name.value}")


def find(which: object, inventory: Inventory) -> DeviceInfo | None:
    """Return the device that ``which`` names; None if it names the current device."""
    name = read(which)
    if name.kind == "current":
        return None
    found = among(name, inventory)
    if len(found) == 1:
        return found[0]
    # A problem may be the cause: a hiding entry, a lost GPU.
    hint = ". ".join([_why_not(name, found, inventory), *inventory.problems])
    available = [str(info) for info in inventory.devices]
    raise no_device(which, available, inventory.visible_devices, hint)


def among(name: Name, inventory: Inventory) -> tuple[DeviceInfo, ...]:
    """Return the devices that a name may mean: one, none, or several."""
    kind, value, devices = name.kind, name.value, inventory.devices
    if kind == "ordinal":
        assert isinstance(value, int)
        return (devices[value],) if 0 <= value < len(devices) else ()
    if kind == "uuid":
        assert isinstance(value, str)
        return tuple(info for info in devices if _has_prefix(info, value))
    if kind == "pci":
        return tuple(info for info in devices if info.pci_bus_id == value)[:1]
    return ()


def _not_a_name(which: object) -> TypeError:
    said = f"a device is {ACCEPTED}; got {which!r} of type {type(which).__name__}"
    several = ". Several are an annotation: dask.annotate(devices=[0, 1])"
    return TypeError(said + several * isinstance(which, list | tuple))


def _why_not(name: Name, found: Sequence[DeviceInfo], inventory: Inventory) -> str:
    if name.kind == "ordinal":
        count = len(inventory.devices)
        return (
            f"Ordinals go from 0 to {count - 1}" if count else "CUDA shows this process no device"
        )
    if name.kind == "pci":
        return "No visible device has this PCI bus id"
    if name.kind == "unknown":
        return str(name.value)
    if found:
        return f"{len(found)} devices have this prefix: add digits"
    if any(_has_prefix(info, str(name.value)) for info in inventory.hidden):
        if inventory.visible_devices is None:
            alone = "A MIG instance is shown if CUDA_VISIBLE_DEVICES names it alone"
            return f"This machine has it, but CUDA does not show it. {alone}"
        return "This machine has it, but CUDA_VISIBLE_DEVICES hides it from this process"
    return "No device of this machine has this UUID"


def _has_prefix(info: DeviceInfo, value: str) -> bool:
    start = 0 if value.startswith(("gpu-", "mig-")) else len("GPU-")
    return info.uuid.lower().startswith(value, start)


def _read_text(text: str) -> Name:
    if _UUID.fullmatch(text) or _BARE_UUID.fullmatch(text):
        return Name("uuid", text.lower())
    if text in CURRENT:
        return Name("current")
    if match := _ORDINAL.fullmatch(text):
        return Name("ordinal", int(match[1]))
    if match := _PCI_BUS_ID.fullmatch(text):
        return Name("pci", f"{int(match[1] or '0', 16):04x}:{match[2].lower()}")
    hint = f"A device is {ACCEPTED}"
    if several := text if text == "all" else listed(text):
        hint = f"Several devices are an annotation: dask.annotate(devices={several!r}). {hint}"
    if text != text.strip():
        hint = f"It has blanks around it. {hint}"
    if text in (AUTO, NO_DEVICE):
        hint = f"{text!r} is for annotations alone: dask.annotate(device={text!r}). {hint}"
    if text.lower() == "any":
        hint = f'For any device, write dask.annotate(device="{AUTO}"). {hint}'
    if _HOST.fullmatch(text):
        hint = (
            'The host is no device. to_device(value, "cpu") copies a value to it, and '
            f"dask.annotate(device=None) keeps a task off the devices. {hint}"
        )
    return Name("unknown", hint)


def _read_foreign(which: object, ordinal_of: Callable[[Any], int | None]) -> Name:
    try:
        ordinal = ordinal_of(which)
    except (AttributeError, TypeError):
        raise _not_a_name(which) from None
    except LookupError:
        return Name("unknown", "It is not a CUDA device")
    return Name("current") if ordinal is None else Name("ordinal", ordinal)


def _torch_ordinal(device: Any) -> int | None:
    if not isinstance(device.type, str):  # a tensor has a method of this name
        raise TypeError(device)
    if device.type != "cuda":
        raise LookupError(repr(device))  # its text: the object may not be picklable
    return None if device.index is None else operator.index(device.index)


def _jax_ordinal(device: Any) -> int:
    if device.platform not in ("gpu", "cuda"):
        raise LookupError(repr(device))  # its text: the object may not be picklable
    return operator.index(device.local_hardware_id)


# By the first part of the module that defines the object's class. This imports nothing.
_FOREIGN: dict[str, Callable[[Any], int | None]] = {
    "torch": _torch_ordinal,
    "cupy": lambda device: operator.index(device.id),
    "numba": lambda device: int(device.id),  # a CUdevice: only int() turns it into a number
    "jaxlib": _jax_ordinal,
    "jax": _jax_ordinal,
    "cuda": lambda device: operator.index(device.device_id),
}
