"""The devices of one worker: the tasks on each, and the choice of a device for the next task."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Protocol

from dask_devctx import driver
from dask_devctx.annotations import Request, not_an_annotation
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.inspection import link_rank
from dask_devctx.cuda.naming import AUTO
from dask_devctx.cuda.on_device import refuse_twice
from dask_devctx.errors import (
    DeviceNotFoundError,
    DeviceReservationError,
    NotEnoughDevicesError,
)
from dask_devctx.worker.placement.groups import choose_group
from dask_devctx.worker.placement.load import Load, soonest, unknown_s
from dask_devctx.worker.placement.policy import Candidate, Choice, Policy, start_soonest

# The weight of a new measurement against the known duration of a prefix.
_NEW_DURATION_WEIGHT = 0.5
# How long a reading of the devices' free memory is used: each takes microseconds.
_MEMORY_AGE_S = 0.5
# Shares are sums of fractions: so much of a device may be missing.
_ROUNDING = 1e-6


class Located(Protocol):
    """The place of a value."""

    @property
    def nbytes(self) -> Mapping[Device, int]:
        """The bytes of the value on each device; empty for a value on the host."""

    @property
    def copies(self) -> Collection[Device]:
        """The devices that have a copy of it."""


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
    limits
        The bytes that tasks may reserve, by device; a device without an entry is unlimited.

    Attributes
    ----------
    placed
        The tasks that are counted now, and their devices; the first device of several.
    durations_s
        The durations of tasks, by prefix.

    Notes
    -----
    Use it only on the worker's event loop.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        tasks_per_device: int,
        policy: Policy,
        limits: Mapping[Device, int] | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self._limits = limits or {}
        self._tasks_per_device = tasks_per_device
        self._policy = policy
        self._choose = Choice(policy)
        self._loads = {device: Load(device) for device in devices}
        self.placed: dict[Hashable, Device] = {}
        self._groups: dict[Hashable, tuple[Device, ...]] = {}
        self._named: dict[tuple[type, object], Device] = {}
        self.durations_s: dict[str, float] = {}
        self._typical_s = 0.0
        self._turn = 0
        self._memory_read_at = float("-inf")

    def place(
        self, key: Hashable, prefix: str, wanted: object, inputs: Sequence[Located] = ()
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
            device = self.placed.get(key) or self._any_device(inputs)
        else:
            device = self._asked_for(wanted)
        if key in self.placed:
            self.remove(key)
        load = self._loads[device]
        load.last_turn = self._turn = self._turn + 1
        load.prefixes[key] = prefix
        load.counts[prefix] = load.counts.get(prefix, 0) + 1
        self.placed[key] = device
        return device

    def place_group(
        self, key: Hashable, prefix: str, request: Request, inputs: Sequence[Located] = ()
    ) -> tuple[Device, ...]:
        """Return the devices that a task with a request runs on, and count the task on each.

        Parameters
        ----------
        key, prefix, inputs
            As for :meth:`place`.
        request
            What the task asks for.

        Raises
        ------
        DeviceNotFoundError, NotEnoughDevicesError
            The worker does not have these devices, or not so many.
        DeviceReservationError
            No device may give a task so many bytes.
        ValueError
            The request names a device twice.
        """
        if request.names:
            group = self._named_group(request.names)
        else:
            group = self._any_group(key, request, inputs)
        self._check_limits(request, group)
        self.remove(key)
        self._turn += 1
        taken = self.share_of(request, group[0]) * self._tasks_per_device
        for device in group:
            load = self._loads[device]
            load.last_turn = self._turn
            load.parts[key] = prefix, taken
        self.placed[key] = group[0]
        self._groups[key] = group
        return group

    def share_of(self, request: Request, device: Device) -> float:
        """Return the part of a device that a request takes.

        A request that does not say counts as a task that says nothing. If it reserves a smaller
        part of the device's memory, it counts as this part.
        """
        if request.share is not None:
            return request.share
        one_task, limit = 1 / self._tasks_per_device, self._limits.get(device)
        if request.nbytes is None or not limit:
            return one_task
        return min(request.nbytes / limit, one_task)

    def _any_group(
        self, key: Hashable, request: Request, inputs: Sequence[Located]
    ) -> tuple[Device, ...]:
        if request.number is None:
            return self.devices
        if request.number > len(self.devices):
            raise self._not_enough(request.number)
        if len(before := self._groups.get(key, ())) == request.number:
            return before
        nbytes = request.nbytes or 0
        usable = [one for one in self.devices if self._limits.get(one, nbytes) >= nbytes]
        if request.number > len(usable):
            self._check_limits(request, self.devices)
        share = min(self.share_of(request, one) for one in usable)
        candidates = self._candidates(inputs, usable, share, request.number)
        if request.number == 1:
            return (self._choose(candidates),)
        located = [(one.nbytes, frozenset(one.copies)) for one in inputs]
        return choose_group(candidates, request.number, located, link_rank)

    def _check_limits(self, request: Request, group: Sequence[Device]) -> None:
        nbytes = request.nbytes or 0
        low = {one: limit for one in group if (limit := self._limits.get(one, nbytes)) < nbytes}
        if low:
            raise DeviceReservationError(nbytes, {str(one.info): n for one, n in low.items()})

    def remove(self, key: Hashable) -> Device | None:
        """Stop counting a task; return its device, or None."""
        device = self.placed.pop(key, None)
        if device is not None and key in self._groups:
            for one in self._groups.pop(key):
                del self._loads[one].parts[key]
        elif device is not None:
            load = self._loads[device]
            prefix = load.prefixes.pop(key)
            load.counts[prefix] -= 1
            if not load.counts[prefix]:
                del load.counts[prefix]
        return device

    def keep(self, key: Hashable, devices: Sequence[Device], share: float) -> None:
        """Count an actor that keeps a part of some devices."""
        for device in devices:
            self._loads[device].kept[key] = share * self._tasks_per_device

    def drop(self, key: Hashable) -> None:
        """Stop counting an actor."""
        for load in self._loads.values():
            load.kept.pop(key, None)

    def has_queue(self, device: Device) -> bool:
        """Return whether the task that was placed last on a device waits for others there."""
        return self._loads[device].tasks > self._tasks_per_device

    def record_duration(self, prefix: str, seconds: float) -> None:
        """Learn how long a task of this prefix ran."""
        known = self.durations_s.get(prefix, seconds)
        self.durations_s[prefix] = known + _NEW_DURATION_WEIGHT * (seconds - known)
        self._typical_s += _NEW_DURATION_WEIGHT * (seconds - self._typical_s)

    def _any_device(self, inputs: Sequence[Located]) -> Device:
        if len(self.devices) == 1 and self._policy is start_soonest:
            return self.devices[0]
        if not inputs and self._policy is start_soonest:
            self._read_memory()
            if load := soonest(self._loads.values(), self.durations_s, unknown_s(self._typical_s)):
                return load.device
        return self._choose(self._candidates(inputs, self.devices, 1 / self._tasks_per_device))

    def _candidates(
        self, inputs: Iterable[Located], devices: Sequence[Device], share: float, number: int = 1
    ) -> list[Candidate]:
        """Return the state of the devices that a task could get a part of.

        Where actors keep so much of a device that the task would wait for their end, the device is
        none of them, unless the task needs it for its number of devices.
        """
        self._read_memory()
        moves, move_nbytes = self._moves(inputs)
        at_once = self._tasks_per_device
        most_kept = at_once * (1 - share + _ROUNDING)
        loads = [self._loads[device] for device in devices]
        unkept = [load for load in loads if load.kept_places <= most_kept]
        return [
            Candidate(
                device=load.device,
                queued=load.tasks,
                busy_s=load.busy_s(self.durations_s, unknown_s(self._typical_s)) / at_once,
                move_nbytes=move_nbytes[load.device],
                since=self._turn - load.last_turn,
                free_nbytes=load.free_nbytes,
                moves=moves[load.device],
                waits=load.tasks >= at_once,
            )
            for load in (unkept if len(unkept) >= number else loads)
        ]

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
            parts = one.nbytes
            if not parts:
                continue
            copies = one.copies
            total = sum(parts.values())
            # A value on several devices has no home: its parts must be joined.
            home = next(iter(parts)) if len(parts) == 1 else None
            for device in moves:
                if device is not home and device not in copies:
                    moves[device] += 1
                    nbytes[device] += total - parts.get(device, 0)
        return moves, nbytes

    def _named_group(self, names: Sequence[object]) -> tuple[Device, ...]:
        if len(names) == 1:
            return (self._asked_for(names[0]),)
        group = tuple(map(_device, names))
        refuse_twice(group)
        if not self._loads.keys() >= set(group):  # other workers may have the rest
            raise self._not_enough(len(group), group)
        return group

    def _not_enough(self, wanted: int, named: Sequence[Device] = ()) -> NotEnoughDevicesError:
        mine, asked = ([str(one.info) for one in devices] for devices in (self.devices, named))
        on_machine = len(discovery.inventory(driver.backend()).devices)
        return NotEnoughDevicesError(wanted, mine, asked, on_machine)

    def _asked_for(self, wanted: object) -> Device:
        name = wanted.__class__, wanted
        if name[0] in (int, str):  # such a name always means the same device: look it up here
            device = self._named.get(name)
            if device is not None:
                return device
        device = _device(wanted)
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


def _device(wanted: object) -> Device:
    try:
        return Device(wanted)
    except TypeError:
        raise not_an_annotation(wanted) from None
