"""CuPy's allocator, and the runtime's functions for the pools of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dask_devctx import Device


def _malloc(size: int) -> object:
    raise NotImplementedError


def malloc_async(size: int) -> object:
    raise NotImplementedError


_allocator: Callable[[int], Any] = _malloc


def get_allocator() -> Callable[[int], Any]:
    return _allocator


def set_allocator(allocator: Callable[[int], Any] | None = None) -> None:
    global _allocator
    _allocator = _malloc if allocator is None else allocator


class runtime:
    cudaMemPoolAttrReleaseThreshold = 4
    thresholds: ClassVar[dict[int, int]] = {}
    trimmed: ClassVar[list[int]] = []

    @staticmethod
    def getDevice() -> int:
        device = Device.current()
        return 0 if device is None else device.device_id

    @staticmethod
    def deviceGetDefaultMemPool(device: int) -> int:
        return 1000 + device

    @classmethod
    def memPoolGetAttribute(cls, pool: int, attr: int) -> int:
        assert attr == cls.cudaMemPoolAttrReleaseThreshold
        return cls.thresholds.get(pool, 0)

    @classmethod
    def memPoolSetAttribute(cls, pool: int, attr: int, value: object) -> None:
        assert attr == cls.cudaMemPoolAttrReleaseThreshold
        assert isinstance(value, int)
        assert 0 <= value < 2**64
        cls.thresholds[pool] = value

    @classmethod
    def memPoolTrimTo(cls, pool: int, size: int) -> None:
        assert size == 0
        cls.trimmed.append(pool)
