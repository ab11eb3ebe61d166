"""RMM's resources, with their own signatures; each belongs to the device that was current."""

from __future__ import annotations

import os
from collections import defaultdict

from dask_devctx import Device


def _current_ordinal() -> int:
    device = Device.current()
    return 0 if device is None else device.device_id


class DeviceMemoryResource:
    def __init__(self) -> None:
        self.device_id = _current_ordinal()


class CudaMemoryResource(DeviceMemoryResource):
    pass


class ManagedMemoryResource(DeviceMemoryResource):
    pass


class CudaAsyncMemoryResource(DeviceMemoryResource):
    def __init__(
        self,
        initial_pool_size: int | str | None = None,
        release_threshold: int | None = None,
        enable_ipc: bool = False,
        enable_fabric: bool = False,
    ) -> None:
        super().__init__()
        self.given = (initial_pool_size, release_threshold)


class UpstreamResourceAdaptor(DeviceMemoryResource):
    def __init__(self, upstream_mr: DeviceMemoryResource) -> None:
        super().__init__()
        assert upstream_mr.device_id == self.device_id
        self.upstream_mr = upstream_mr

    def get_upstream(self) -> DeviceMemoryResource:
        return self.upstream_mr


class PoolMemoryResource(UpstreamResourceAdaptor):
    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        initial_pool_size: int | str | None = None,
        maximum_pool_size: int | str | None = None,
    ) -> None:
        super().__init__(upstream_mr)
        for size in (initial_pool_size, maximum_pool_size):
            if isinstance(size, int) and size % 256:
                raise RuntimeError("Error, pool size required to be a multiple of 256 bytes")
        self.given = (initial_pool_size, maximum_pool_size)

    def pool_size(self) -> int:
        return int(self.given[0] or 0)


class LimitingResourceAdaptor(UpstreamResourceAdaptor):
    def __init__(self, upstream_mr: DeviceMemoryResource, allocation_limit: int) -> None:
        super().__init__(upstream_mr)
        self.given = (allocation_limit,)


class LoggingResourceAdaptor(UpstreamResourceAdaptor):
    def __init__(self, upstream_mr: DeviceMemoryResource, log_file_name: str | None = None) -> None:
        super().__init__(upstream_mr)
        name, extension = os.path.splitext(os.path.abspath(str(log_file_name)))
        self._log_file_name = f"{name}.dev{self.device_id}{extension}"
        with open(self._log_file_name, "w"):
            pass

    def get_file_name(self) -> str:
        return self._log_file_name


class TrackingResourceAdaptor(UpstreamResourceAdaptor):
    def __init__(self, upstream_mr: DeviceMemoryResource, capture_stacks: bool = False) -> None:
        super().__init__(upstream_mr)

    def get_allocated_bytes(self) -> int:
        return 0


_of_device: defaultdict[int, DeviceMemoryResource] = defaultdict(CudaMemoryResource)


def get_per_device_resource(device: int) -> DeviceMemoryResource:
    return _of_device[device]


def set_per_device_resource(device: int, mr: DeviceMemoryResource) -> None:
    assert mr.device_id == device, "a resource must be made while its device is current"
    _of_device[device] = mr


def get_current_device_resource() -> DeviceMemoryResource:
    return get_per_device_resource(_current_ordinal())
