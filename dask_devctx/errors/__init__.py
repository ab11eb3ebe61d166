"""The exceptions that this package raises.

Every error keeps what it reports as attributes and hands all of them to ``super().__init__``, so
that it survives pickling on its way from a worker to a client.
"""

from dask_devctx.errors.devices import (
    DevctxError,
    DeviceMemoryError,
    DeviceMismatchError,
    DeviceNotFoundError,
    DeviceScopeError,
    DriverError,
    DriverUnavailableError,
    ForkedProcessError,
    OneDeviceOnlyError,
    VisibleDevicesError,
)
from dask_devctx.errors.versions import UnsupportedDaskError
from dask_devctx.errors.workers import (
    DeviceFailedError,
    DeviceOutOfMemoryError,
    DevicesInUseError,
    LockDirectoryError,
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
    "ForkedProcessError",
    "LockDirectoryError",
    "OneDeviceOnlyError",
    "UnsupportedDaskError",
    "VisibleDevicesError",
]

for _name in __all__:  # where they are looked for, pickled from, and shown to be from
    globals()[_name].__module__ = __name__
