"""The placement of a worker that does not have its devices: tasks that ask for one fail."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from dask_devctx.annotations import Request
from dask_devctx.cuda.device import Device
from dask_devctx.worker.placement.placement import Located


class NoDevices:
    """Takes the place of a placement on a worker that does not have its devices.

    Parameters
    ----------
    reason
        The reason; a task that asks for a device fails with it.
    """

    devices: tuple[Device, ...] = ()

    def __init__(self, reason: Exception) -> None:
        self.placed: dict[Hashable, Device] = {}
        self.durations_s: dict[str, float] = {}
        self._reason = reason

    def place(
        self, key: Hashable, prefix: str, wanted: object, inputs: Iterable[Located] = ()
    ) -> Device:
        raise self._reason

    def place_group(
        self, key: Hashable, prefix: str, request: Request, inputs: Sequence[Located] = ()
    ) -> tuple[Device, ...]:
        raise self._reason

    def share_of(self, request: Request, device: Device) -> float:
        raise self._reason

    def keep(self, key: Hashable, devices: Sequence[Device], share: float) -> None:
        pass

    def drop(self, key: Hashable) -> None:
        pass

    def remove(self, key: Hashable) -> Device | None:
        return None

    def has_queue(self, device: Device) -> bool:
        return False

    def record_duration(self, prefix: str, seconds: float) -> None:
        pass
