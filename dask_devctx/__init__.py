"""Run dask tasks, and any other code, on the GPU that is assigned to them.

``Device``, ``Context`` and ``on_device`` work alone; importing them imports neither dask nor
distributed and touches no driver. The distributed half is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dask_devctx.cuda.context import Context, PrimaryContext
from dask_devctx.cuda.device import Device, devices
from dask_devctx.cuda.on_device import on_device, task_devices
from dask_devctx.cuda.properties import ContextFlags, Limit
from dask_devctx.errors import (
    DevctxError,
    DeviceFailedError,
    DeviceMemoryError,
    DeviceNotFoundError,
    DeviceOutOfMemoryError,
    DeviceScopeError,
    DevicesInUseError,
    DriverError,
    DriverUnavailableError,
    VisibleDevicesError,
)

if TYPE_CHECKING:
    from dask_devctx.client.cluster import LocalDeviceCluster
    from dask_devctx.client.report import report
    from dask_devctx.client.timeline import timeline
    from dask_devctx.plugin import DevicePlugin
    from dask_devctx.scheduler.routing import DeviceRouting
    from dask_devctx.simulated_array import SimulatedArray as SimulatedArray
    from dask_devctx.transfer import device_of, to_device
    from dask_devctx.worker.placement.policy import Candidate, start_soonest

__all__ = [
    "Candidate",
    "Context",
    "ContextFlags",
    "DevctxError",
    "Device",
    "DeviceFailedError",
    "DeviceMemoryError",
    "DeviceNotFoundError",
    "DeviceOutOfMemoryError",
    "DevicePlugin",
    "DeviceRouting",
    "DeviceScopeError",
    "DevicesInUseError",
    "DriverError",
    "DriverUnavailableError",
    "Limit",
    "LocalDeviceCluster",
    "PrimaryContext",
    "SimulatedArray",
    "VisibleDevicesError",
    "device_of",
    "devices",
    "on_device",
    "report",
    "start_soonest",
    "task_devices",
    "timeline",
    "to_device",
]

# The names that need dask, and the module of each.
_DISTRIBUTED_HALF = {
    "DevicePlugin": "dask_devctx.plugin",
    "DeviceRouting": "dask_devctx.scheduler.routing",
    "LocalDeviceCluster": "dask_devctx.client.cluster",
    # `--preload dask_devctx` looks for this here
    "dask_setup": "dask_devctx.cli.preload",
    "SimulatedArray": "dask_devctx.simulated_array",  # only this needs NumPy
    "Candidate": "dask_devctx.worker.placement.policy",
    "device_of": "dask_devctx.transfer",
    "report": "dask_devctx.client.report",
    "start_soonest": "dask_devctx.worker.placement.policy",
    "timeline": "dask_devctx.client.timeline",
    "to_device": "dask_devctx.transfer",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":  # reading it takes longer than the rest of the import
        metadata = import_module("importlib.metadata")
        try:
            return metadata.version("dask-devctx")
        except metadata.PackageNotFoundError:  # a source tree that is not installed
            return "0+unknown"
    if name not in _DISTRIBUTED_HALF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_DISTRIBUTED_HALF[name])
    except AttributeError as error:  # ``from dask_devctx import …`` would hide it
        raise ImportError(f"{_DISTRIBUTED_HALF[name]} cannot be imported: {error}") from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_DISTRIBUTED_HALF})
