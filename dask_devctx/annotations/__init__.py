"""The devices that a task asks for, by its annotations or by its function.

``device`` names one device. ``devices`` asks for several at once, ``device_share`` for a part of
each, and ``device_memory`` reserves bytes on each.
"""

from dask_devctx.annotations.names import DEVICE, DEVICES, MEMORY, NAMES, SHARE
from dask_devctx.annotations.request import (
    ANY_DEVICE,
    HOST_ONLY,
    Request,
    Unannotated,
    answer,
    carried_device,
    not_an_annotation,
    requested_device,
)

__all__ = [
    "ANY_DEVICE",
    "DEVICE",
    "DEVICES",
    "HOST_ONLY",
    "MEMORY",
    "NAMES",
    "SHARE",
    "Request",
    "Unannotated",
    "answer",
    "carried_device",
    "not_an_annotation",
    "requested_device",
]
