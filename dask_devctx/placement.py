"""The devices of one worker: who is on which, and who goes where next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dask_devctx import discovery, driver, selection
from dask_devctx.annotations import AUTO
from dask_devctx.assignment import Candidate, Policy
from dask_devctx.device import Device

# How much a new measurement counts against what was known of a prefix' duration.
_NEW_DURATION_WEIGHT = 0.5


@dataclass
class _Load:
    """What a device has to do: the expected seconds of each task there, by key."""

    device: Device
    expected_s: dict[Hashable, float] = field(default_factory=dict)
    last_turn: int = 0


class Placement:
    """Which task is on which device of a worker.

    Parameters
    ----------
    devices
        The worker's devices; not empty.
    tasks_per_device
        How many tasks run on a device at a time.
    policy
        Chooses a device for a task that asks for none.

    Notes
    -----
    Used from the worker's event loop alone.
    """

    def __init__(self, devices: Sequence[Device], tasks_per_device: int, policy: Policy) -> None:
        self.devices = tuple(devices)
        self._tasks_per_device = tasks_per_device
        self._policy = policy
        self._loads = {device: _Load(device) for device in devices}
        self._placed: dict[Hashable, Device] = {}
        self._durations_s: dict[str, float] = {}
        self._turn = 0

    def place(self, key: Hashable, prefix: str, wanted: object) -> Device:
        """Return the device that a task runs on, and count it there until :meth:`remove`.

        Parameters
        ----------
        key
            The task's key.
        prefix
            What tasks of its kind are called, by which durations are known.
        wanted
            ``"auto"``, or what :class:`~dask_devctx.Device` accepts.

        Raises
        ------
        DeviceNotFoundError
            The worker does not have the device.
        TypeError
            It is no way to name a device.
        """
        self.remove(key)
        device = self._assign() if wanted == AUTO else self._named(wanted)
        load = self._loads[device]
        self._turn += 1
        load.last_turn = self._turn
        load.expected_s[key] = self._durations_s.get(prefix, 0.0)
        self._placed[key] = device
        return device

    def remove(self, key: Hashable) -> None:
        """Forget a task: it is done, or it left its device's threads."""
        device = self._placed.pop(key, None)
        if device is not None:
            del self._loads[device].expected_s[key]

    def took(self, prefix: str, seconds: float) -> None:
        """Learn how long a task of this prefix ran."""
        known = self._durations_s.get(prefix, seconds)
        self._durations_s[prefix] = known + _NEW_DURATION_WEIGHT * (seconds - known)

    def device_of(self, key: Hashable) -> Device | None:
        """Return the device where a task is counted now, or None."""
        return self._placed.get(key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._placed

    def _assign(self) -> Device:
        candidates = [
            Candidate(
                device=load.device,
                queued=len(load.expected_s),
                busy_s=sum(load.expected_s.values()) / self._tasks_per_device,
                move_nbytes=0,
                since=self._turn - load.last_turn,
            )
            for load in self._loads.values()
        ]
        return self._policy(candidates).device

    def _named(self, wanted: object) -> Device:
        device = Device(wanted)
        if device not in self._loads:
            found = discovery.inventory(driver.backend())
            have = ", ".join(map(str, self.devices))
            raise selection.not_found(wanted, found, f"This worker uses only {have}")
        return device
