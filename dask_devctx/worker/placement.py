"""The devices of one worker: the tasks on each, and the choice of a device for the next task."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Protocol

from dask_devctx import driver
from dask_devctx.annotations import not_an_annotation
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import AUTO
from dask_devctx.errors import DeviceNotFoundError
from dask_devctx.worker.policy import RELUCTANCE_S, Candidate, Policy, start_soonest

# The weight of a new measurement against the known duration of a prefix.
_NEW_DURATION_WEIGHT = 0.5
# The least duration that is expected of a task whose prefix was never measured. It is so long that
# no task waits for it only to avoid a copy of its inputs.
_UNKNOWN_S = 10 * RELUCTANCE_S
# How long a reading of the devices' free memory is used: each takes microseconds.
_MEMORY_AGE_S = 0.5


class Located(Protocol):
    """The place of a value."""

    @property
    def nbytes(self) -> Mapping[Device, int]:
        """The bytes of the value on each device; empty for a value on the host."""

    @property
    def copies(self) -> Collection[Device]:
        """The devices that have a copy of it."""


class _Load:
    """The tasks of a device: the prefix of each task, by key, and the number of tasks by prefix."""

    __slots__ = ("counts", "device", "free_nbytes", "last_turn", "prefixes")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.prefixes: dict[Hashable, str] = {}
        self.counts: dict[str, int] = {}  # kept up to date, since a queue may be long
        self.last_turn = 0
        self.free_nbytes: int | None = None


class Placement:
    """Chooses a device of a worker for each task, and counts the tasks on each device.

    Parameters
    ----------
    devices
        The worker's devices; not empty.
    tasks_per_device
        How many tasks run on a device at a time.
    policy
        Chooses a device for a task that asks for none.

    Attributes
    ----------
    placed
        The tasks that are counted now, and their devices.

    Notes
    -----
    Use it only on the worker's event loop.
    """

    def __init__(self, devices: Sequence[Device], tasks_per_device: int, policy: Policy) -> None:
        self.devices = tuple(devices)
        self._tasks_per_device = tasks_per_device
        self._policy = policy
        self._loads = {device: _Load(device) for device in devices}
        self.placed: dict[Hashable, Device] = {}
        self._named: dict[tuple[type, object], Device] = {}
        self._durations_s: dict[str, float] = {}
        self._typical_s = 0.0
        self._turn = 0
        self._memory_read_at = float("-inf")

    def place(
        self, key: Hashable, prefix: str, wanted: object, inputs: Iterable[Located] = ()
    ) -> Device:
        """Return the device that a task runs on, and count the task there until :meth:`remove`.

        A task that is counted already and asks for any device stays on its device.

        Parameters
        ----------
        key
            The task's key.
        prefix
            The common name of tasks of its kind, by which durations are known.
        wanted
            ``"auto"``, or an argument that :class:`~dask_devctx.Device` accepts.
        inputs
            The inputs of the task; they are read only if there is a choice.

        Raises
        ------
        DeviceNotFoundError
            The worker does not have the device.
        TypeError
            ``wanted`` names no device.
        """
        if wanted.__class__ is str and wanted == AUTO:
            device = self.placed.get(key) or self._assign(inputs)
        else:
            device = self._asked_for(wanted)
        self.remove(key)
        load = self._loads[device]
        self._turn += 1
        load.last_turn = self._turn
        load.prefixes[key] = prefix
        load.counts[prefix] = load.counts.get(prefix, 0) + 1
        self.placed[key] = device
        return device

    def remove(self, key: Hashable) -> Device | None:
        """Stop counting a task; return its device, or None."""
        device = self.placed.pop(key, None)
        if device is not None:
            load = self._loads[device]
            prefix = load.prefixes.pop(key)
            load.counts[prefix] -= 1
            if not load.counts[prefix]:
                del load.counts[prefix]
        return device

    def has_queue(self, device: Device) -> bool:
        """Return whether the task that was placed last on a device waits for others there."""
        return len(self._loads[device].prefixes) > self._tasks_per_device

    def record_duration(self, prefix: str, seconds: float) -> None:
        """Learn how long a task of this prefix ran."""
        known = self._durations_s.get(prefix, seconds)
        self._durations_s[prefix] = known + _NEW_DURATION_WEIGHT * (seconds - known)
        self._typical_s += _NEW_DURATION_WEIGHT * (seconds - self._typical_s)

    def _busy_s(self, load: _Load) -> float:
        """Return how long a device needs for its tasks, as far as durations are known."""
        known, unknown_s = self._durations_s, max(self._typical_s, _UNKNOWN_S)
        busy_s = 0.0
        for prefix, count in load.counts.items():
            busy_s += count * known.get(prefix, unknown_s)
        return busy_s

    def _assign(self, inputs: Iterable[Located]) -> Device:
        if len(self.devices) == 1 and self._policy is start_soonest:
            return self.devices[0]
        self._read_memory()
        moves, move_nbytes = self._moves(inputs)
        turn, share = self._turn, self._tasks_per_device
        candidates = [
            Candidate(
                device,
                len(load.prefixes),
                self._busy_s(load) / share,
                move_nbytes[device],
                turn - load.last_turn,
                load.free_nbytes,
                moves[device],
                len(load.prefixes) >= share,
            )
            for device, load in self._loads.items()
        ]
        return self._chosen(candidates)

    def _chosen(self, candidates: Sequence[Candidate]) -> Device:
        name = getattr(self._policy, "__qualname__", repr(self._policy))
        try:
            chosen = self._policy(candidates)
        except Exception as error:
            error.add_note(f"The placement policy {name} raised it (DevicePlugin(policy=...))")
            raise
        if not isinstance(chosen, Candidate) or chosen.device not in self._loads:
            raise TypeError(
                f"the placement policy {name} must return one of the candidates that it is given, "
                f"got {chosen!r}"
            )
        return chosen.device

    def _read_memory(self) -> None:
        now = monotonic()
        if now - self._memory_read_at > _MEMORY_AGE_S:
            self._memory_read_at = now
            for load in self._loads.values():
                found = discovery.memory_info(driver.backend(), load.device.info)
                load.free_nbytes = None if found is None else found[0]

    def _moves(self, inputs: Iterable[Located]) -> tuple[dict[Device, int], dict[Device, int]]:
        """Return how many of the inputs each device lacks, and their bytes."""
        moves, nbytes = dict.fromkeys(self._loads, 0), dict.fromkeys(self._loads, 0)
        for one in inputs:
            places = one.nbytes
            if not places:
                continue
            copies = one.copies
            total = sum(places.values())
            # A value on several devices has no home: its parts must be joined.
            home = next(iter(places)) if len(places) == 1 else None
            for device in moves:
                if device is not home and device not in copies:
                    moves[device] += 1
                    nbytes[device] += total - places.get(device, 0)
        return moves, nbytes

    def _asked_for(self, wanted: object) -> Device:
        name = wanted.__class__, wanted
        if name[0] in (int, str):  # such a name always means the same device: look it up here
            device = self._named.get(name)
            if device is not None:
                return device
        try:
            device = Device(wanted)
        except TypeError:
            raise not_an_annotation(wanted) from None
        if device not in self._loads:
            raise DeviceNotFoundError(
                wanted,
                [str(mine.info) for mine in self.devices],
                discovery.inventory(driver.backend()).visible_devices,
                f"The machine has {device.info}, which this worker does not use, and no worker "
                "that uses it was found among the workers that the task may run on",
            )
        if name[0] in (int, str):
            self._named[name] = device
        return device


class NoDevices:
    """Takes the place of :class:`Placement` on a worker that does not have its devices.

    Parameters
    ----------
    reason
        The reason; a task that asks for a device fails with it.
    """

    devices: tuple[Device, ...] = ()

    def __init__(self, reason: Exception) -> None:
        self.placed: dict[Hashable, Device] = {}
        self._reason = reason

    def place(
        self, key: Hashable, prefix: str, wanted: object, inputs: Iterable[Located] = ()
    ) -> Device:
        raise self._reason

    def remove(self, key: Hashable) -> Device | None:
        return None

    def has_queue(self, device: Device) -> bool:
        return False

    def record_duration(self, prefix: str, seconds: float) -> None:
        pass
