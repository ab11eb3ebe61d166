"""The names of the annotations, and the names that are mistaken for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

DEVICE: Final = "device"
DEVICES: Final = "devices"
SHARE: Final = "device_share"
MEMORY: Final = "device_memory"

NAMES: Final = frozenset({DEVICE, DEVICES, SHARE, MEMORY})

_NAME_ONE: Final = f"To name a device, write dask.annotate({DEVICE}=1)"
_TAKE_SEVERAL: Final = (
    f"To take several devices at once, write dask.annotate({DEVICES}=2), and to name one, "
    f"dask.annotate({DEVICE}=1)"
)
_TAKE_A_PART: Final = f"To take a part of a device, write dask.annotate({SHARE}=0.5)"
_RESERVE: Final = f'To reserve memory of a device, write dask.annotate({MEMORY}="4 GiB")'
# Annotations that seem to be ours, but mean nothing to this package and dask, with the right one.
_MISTAKEN: Final = {
    "Device": _NAME_ONE,
    "Devices": _TAKE_SEVERAL,
    "cuda": _NAME_ONE,
    "device_fraction": _TAKE_A_PART,
    "device_mem": _RESERVE,
    "gpu": _NAME_ONE,
    "gpu_memory": _RESERVE,
    "gpus": _TAKE_SEVERAL,
    "num_devices": _TAKE_SEVERAL,
    "num_gpus": _TAKE_SEVERAL,
}
_NOTHING: Final[tuple[str, ...]] = ()


def mistaken(annotations: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of annotations that seem to be ours, but mean nothing."""
    return sorted(_MISTAKEN.keys() & annotations.keys()) or _NOTHING


def about_mistaken(name: str) -> str:
    """Return the warning about such an annotation."""
    return (
        f"the annotation {name!r} means nothing to dask-devctx and dask, and has no effect on the "
        f"device of its tasks. {_MISTAKEN[name]}"
    )


ABOUT_ONE: Final = (
    f"the annotation {DEVICES}=1 asks for one device, any of them, as a task does that says "
    f"nothing. {_NAME_ONE}"
)


def about_no_plugin(name: str) -> str:
    """Return the warning about an annotation that no worker of the cluster understands."""
    return (
        f"tasks have the annotation {name!r}, and no worker of this cluster uses devices: the "
        "annotation has no effect. Register the plugin: client.register_plugin(DevicePlugin())"
    )
