"""The exceptions for tasks that ask for more than any worker can give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask_devctx.errors.base import DevctxError, nbytes_text


class NotEnoughDevicesError(DevctxError, LookupError):
    """A task asks for more devices at once than its worker has.

    Parameters
    ----------
    wanted
        How many devices it asks for.
    devices
        A description of each device of the worker.
    named
        A description of each device that it names; empty if it asks for any.
    on_machine
        How many devices the worker's machine has; None where it is unknown.
    """

    wanted: int
    devices: Sequence[str] = ()
    named: Sequence[str] = ()
    on_machine: int | None = None

    @staticmethod
    def _convert(fields: dict[str, Any]) -> None:
        fields["devices"] = tuple(fields["devices"])
        fields["named"] = tuple(fields["named"])

    def __str__(self) -> str:
        have = ", ".join(self.devices) or "none"
        asked = f" ({', '.join(self.named)})" if self.named else ""
        lacking = "all of them" if self.named else "so many"
        failed = (
            f"the task asks for {self.wanted} devices at once{asked}, and no worker that it may "
            f"run on has {lacking}: this one has {len(self.devices)} ({have})"
        )
        if self.on_machine is not None and self.wanted > self.on_machine:
            return (
                f"{failed}, and its machine has {self.on_machine}. Ask for at most "
                f'{self.on_machine}, or for all devices of a worker with devices="all"'
            )
        enough = f", or workers that have enough with devices_per_worker={self.wanted}"
        enough = "" if self.named else enough
        return (
            f"{failed}. The devices of a task belong to one worker. Start one worker for all "
            f"devices of a machine with LocalDeviceCluster(n_workers=1){enough}"
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
        have = ", ".join(f"{nbytes_text(n)} on {device}" for device, n in self.limits.items())
        return (
            f"the task reserves {nbytes_text(self.nbytes)} of device memory (device_memory), "
            f"and can never have more than {have or 'nothing'}. Reserve less, make the task's "
            "parts smaller, or raise device_memory_limit if the devices have more"
        )
