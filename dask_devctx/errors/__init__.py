"""The exceptions that this package raises."""

from dask_devctx.errors.base import DevctxError
from dask_devctx.errors.devices import (
    DeviceMemoryError,
    DeviceMismatchError,
    DeviceNotFoundError,
    DeviceScopeError,
    DevicesInUseError,
    DriverError,
    DriverUnavailableError,
    LockDirectoryError,
    ValueNotMovableError,
    VisibleDevicesError,
)
from dask_devctx.errors.workers import (
    DeviceFailedError,
    DeviceOutOfMemoryError,
    NotEnoughDevicesError,
    UnsupportedDaskError,
    WorkerSetupError,
)

__all__ = [
    "DevctxError",
    "DeviceFailedError",
    "DeviceMemoryError",
    "DeviceMismatchError",
    "DeviceNotFoundError",
    "DeviceOutOfMemoryError",
    "DeviceScopeError",
    "DevicesInUseError",
    "DriverError",
    "DriverUnavailableError",
    "LockDirectoryError",
    "NotEnoughDevicesError",
    "UnsupportedDaskError",
    "ValueNotMovableError",
    "VisibleDevicesError",
    "WorkerSetupError",
]

for _name in __all__:  # the public module, for pickles and tracebacks
    globals()[_name].__module__ = __name__
