"""The limit of each device's memory, in bytes."""

from __future__ import annotations

from typing import Final

from dask.utils import parse_bytes

from dask_devctx.cuda.device import Device

_AUTO: Final = 0.8


def limit_nbytes(device: Device, limit: float | str | None) -> int | None:
    """Return the bytes of ``device_memory_limit`` on a device; None for no limit."""
    if limit is None:
        return None
    total = device.info.total_memory or device.memory_info.total
    if limit == "auto":
        limit = _AUTO
    if isinstance(limit, str):  # a few bytes, with their unit
        return min(int(parse_bytes(limit)), total)
    return int(limit * total) if limit <= 1 else min(int(limit), total)
