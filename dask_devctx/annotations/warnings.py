"""Warnings of annotations that are mistaken for those of this package, or that nobody reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from dask.utils import parse_bytes

from dask_devctx.annotations import DEVICE, DEVICES, MEMORY, SHARE
from dask_devctx.annotations.runs import RERUN
from dask_devctx.errors.base import nearest

# Annotations that seem to be ours, but mean nothing to this package and dask, with the right one.
_MISTAKEN: Final = {
    **dict.fromkeys(("Device", "cuda", "gpu"), DEVICE),
    **dict.fromkeys(("Devices", "gpus", "num_devices", "num_gpus"), DEVICES),
    **dict.fromkeys(("device_fraction", "share"), SHARE),
    **dict.fromkeys(("device_mem", "gpu_memory"), MEMORY),
}
_EXAMPLES: Final = {
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


@functools.cache
def _meant(name: str) -> str:
    """Return the annotation that another name seems to mean; "" if it means none."""
    if name in _EXAMPLES or name in _MISTAKEN:
        return _MISTAKEN.get(name, "")
    near = nearest(name, _EXAMPLES, _ALIKE)
    return near if near[:1] == name[:1] else ""


def mistaken(annotations: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each annotation that seems to be ours but means nothing."""
    for name, value in annotations.items():
        if name in _OPTIONS:
            yield (
                f"the annotation {name!r} has no effect: it is an option of all tasks of a "
                f"cluster. Write LocalDeviceCluster({name}={value!r})"
            )
        elif meant := _meant(name):
            is_one = meant == DEVICES and value == 1  # such as num_gpus=1, for any device
            remedy = f"{_remedy(meant)}. {_remedy(DEVICE, 1)}" if is_one else _remedy(meant, value)
            yield (
                f"the annotation {name!r} means nothing to dask-devctx and dask, and has no effect "
                f"on the device of its tasks. {remedy}"
            )
    given = annotations.get(MEMORY)
    with suppress(TypeError, ValueError):
        if isinstance(given, int | float | str) and 1 <= (nbytes := parse_bytes(given)) < 2**20:
            yield f"the annotation {MEMORY}={given!r} reserves {nbytes} bytes. {_remedy(MEMORY)}"


def _remedy(name: str, value: object = None) -> str:
    purpose, example = _EXAMPLES[name]
    fits = type(value) in (int, float, str, bool)
    return f"To {purpose}, write dask.annotate({name}={repr(value) if fits else example})"


def about_no_plugin(name: str) -> str:
    """Return the warning about an annotation that no worker of the cluster understands."""
    return (
        f"tasks have the annotation {name!r}, and no worker of this cluster uses devices: the "
        "annotation has no effect. Register the plugin: client.register_plugin(DevicePlugin())"
    )
