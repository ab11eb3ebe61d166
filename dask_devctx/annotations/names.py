"""The names of the annotations, and the names that are mistaken for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from dask.utils import parse_bytes

from dask_devctx.annotations.runs import RERUN
from dask_devctx.errors.base import nearest

DEVICE: Final = "device"
DEVICES: Final = "devices"
SHARE: Final = "device_share"
MEMORY: Final = "device_memory"

NAMES: Final = frozenset({DEVICE, DEVICES, SHARE, MEMORY})

# Annotations that seem to be ours, but mean nothing to this package and dask, with the right one.
_MISTAKEN: Final = {
    "Device": DEVICE,
    "Devices": DEVICES,
    "cuda": DEVICE,
    "device_fraction": SHARE,
    "device_mem": MEMORY,
    "gpu": DEVICE,
    "gpu_memory": MEMORY,
    "gpus": DEVICES,
    "num_devices": DEVICES,
    "num_gpus": DEVICES,
    "share": SHARE,
}
_PURPOSES: Final = {
    DEVICE: ("name a device", "1"),
    DEVICES: ("take several devices at once", "2"),
    SHARE: ("take a part of a device", "0.5"),
    MEMORY: ("reserve memory of a device", '"4 GiB"'),
    RERUN: ("let a task run once only", "False"),
}
# Options of a cluster that a task cannot set; values of some would mean something for a task.
_OPTIONS: Final = frozenset({"device_memory_limit", "oom_retries", "tasks_per_device"})
# Names as like ours as "devcie" and "device_memry". A service and a return are less so.
_ALIKE: Final = 0.82
# An annotation that marks tasks whose client has told its user about these annotations.
TOLD: Final = "devctx-told"


@functools.cache
def _meant(name: str) -> str:
    """Return the annotation that another name seems to mean; "" if it means none."""
    if name in _PURPOSES:
        return ""
    if name in _OPTIONS:
        return name
    near = _MISTAKEN.get(name) or nearest(name, _PURPOSES, _ALIKE)
    return near if name in _MISTAKEN or near[:1] == name[:1] else ""


def mistaken(annotations: Mapping[str, Any]) -> dict[str, str]:
    """Return a warning for each annotation that seems to be ours but means nothing, by name."""
    found = {
        name: about_mistaken(name, value) for name, value in annotations.items() if _meant(name)
    }
    one = annotations.get(DEVICES)
    if type(one) is int and one == 1:
        found[DEVICES] = ABOUT_ONE
    given = annotations.get(MEMORY)
    with suppress(TypeError, ValueError):
        if isinstance(given, int | float | str) and 1 <= (nbytes := parse_bytes(given)) < 2**20:
            found[MEMORY] = (
                f"the annotation {MEMORY}={given!r} reserves {nbytes} bytes. "
                f"{_remedy(MEMORY, None)}"
            )
    return found


def item_on_each(function: str, devices: Sequence[object]) -> str:
    """Return the call that runs a function for one item on each device."""
    return (
        f"[client.submit(on_device(n)({function}), item) for n, item in "
        f"zip({list(devices)!r}, items)]"
    )


def about_mistaken(name: str, value: object) -> str:
    """Return the warning about an annotation that means nothing."""
    if name in _OPTIONS:
        return (
            f"the annotation {name!r} has no effect: it is an option of all tasks of a cluster. "
            f"Write LocalDeviceCluster({name}={value!r}) or DevicePlugin({name}={value!r})"
        )
    meant = _meant(name)
    remedies = [_remedy(meant, value)]
    if meant == DEVICES and not (type(value) is int and value > 1):
        remedies = [_remedy(DEVICES, None), _remedy(DEVICE, value)]
    return (
        f"the annotation {name!r} means nothing to dask-devctx and dask, and has no effect on the "
        f"device of its tasks. {'. '.join(remedies)}"
    )


def _remedy(name: str, value: object) -> str:
    purpose, example = _PURPOSES[name]
    fits = type(value) in (int, float, str, bool)
    return f"To {purpose}, write dask.annotate({name}={repr(value) if fits else example})"


ABOUT_ONE: Final = (
    f"the annotation {DEVICES}=1 asks for one device, any of them, as a task does that says "
    f"nothing. {_remedy(DEVICE, 1)}"
)


def about_no_plugin(name: str) -> str:
    """Return the warning about an annotation that no worker of the cluster understands."""
    return (
        f"tasks have the annotation {name!r}, and no worker of this cluster uses devices: the "
        "annotation has no effect. Register the plugin: client.register_plugin(DevicePlugin())"
    )
