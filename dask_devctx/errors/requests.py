"""The exceptions for tasks that ask for more than any worker can give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask_devctx.errors.base import DevctxError


class NotEnoughDevicesError(DevctxError, LookupError):
    """A task asks for more devices at once than its worker has.

    Parameters
    ----------
    wanted
        How many devices it asks for.
    devices
        A description of each device of the worker.
    """

    wanted: int
    devices: Sequence[str] = ()

    @staticmethod
    def _convert(fields: dict[str, Any]) -> None:
        fields["devices"] = tuple(fields["devices"])

    def __str__(self) -> str:
        have = ", ".join(self.devices) or "none"
        return (
            f"the task asks for {self.wanted} devices at once, and no worker that it may run on "
            f"has so many: this one has {len(self.devices)} ({have}). The devices of a task belong "
            "to one worker. Start one worker for all devices of a machine with "
            "LocalDeviceCluster(n_workers=1), or workers that have enough with "
            f"devices_per_worker={self.wanted}"
        )


class DeviceReservationError(DevctxError, ValueError):
    """A task reserves more memory on a device than tasks may have there.

    Parameters
    ----------
    nbytes
        The bytes that it reserves on each of its devices.
    limits
        The bytes that tasks may have, by the device's description.
    """

    nbytes: int
    limits: Mapping[str, int]

    @staticmethod
    def _convert(fields: dict[str, Any]) -> None:
        fields["limits"] = dict(fields["limits"])

    def __str__(self) -> str:
        have = ", ".join(f"{n / 2**30:.2f} GiB on {device}" for device, n in self.limits.items())
        return (
            f"the task reserves {self.nbytes / 2**30:.2f} GiB of device memory (device_memory), "
            f"and can never have more than {have or 'nothing'}. Reserve less, make the task's "
            "parts smaller, or raise device_memory_limit if the devices have more"
        )
