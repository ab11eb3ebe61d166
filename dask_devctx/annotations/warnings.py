"""Warnings of annotations that are mistaken for those of this package, or that nobody reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

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
_OURS: Final = (DEVICE, DEVICES, SHARE, MEMORY, RERUN)
# Names as like ours as "devcie" and "device_memry". A service and a return are less so.
_ALIKE: Final = 0.82


@functools.cache
def _meant(name: str) -> str:
    """Return the annotation that another name seems to mean; "" if it means none."""
    if name in _OURS or name in _MISTAKEN:
        return _MISTAKEN.get(name, "")
    near = nearest(name, _OURS, _ALIKE)
    return near if near[:1] == name[:1] else ""


def mistaken(annotations: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each annotation that seems to be ours but means nothing."""
    for name, value in annotations.items():
        if meant := _meant(name):
            also = f", or {DEVICE}=1 to name a device" if meant == DEVICES else ""
            yield (
                f"the annotation {name!r} means nothing to dask-devctx and dask, and has no effect "
                f"on the device of its tasks. Write dask.annotate({meant}={value!r}){also}"
            )


def about_no_plugin(name: str) -> str:
    """Return the warning about an annotation that no worker of the cluster understands."""
    return (
        f"tasks have the annotation {name!r}, and no worker of this cluster uses devices: the "
        "annotation has no effect. Register the plugin: client.register_plugin(DevicePlugin())"
    )
