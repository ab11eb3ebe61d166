"""The devices of one worker: the tasks on each, and the choice of a device for the next task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from dask_devctx import driver
from dask_devctx.annotations import ANY_DEVICE, Request, not_an_annotation
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError, nbytes_text, no_device
from dask_devctx.worker.placement.admission import WHOLE, Admission, Claim
from dask_devctx.worker.placement.policy import (
    RELUCTANCE_S,
    Candidate,
    Policy,
    choose,
    choose_group,
    start_soonest,
)

if TYPE_CHECKING:
    from dask_devctx.worker.values.value import Value

# The weight of a new measurement against the known duration of a prefix.
_NEW_DURATION_WEIGHT: Final = 0.5
# How long a reading of the devices' free memory is used: each takes microseconds.
_MEMORY_AGE_S: Final = 0.5
# The duration that is expected of a task whose prefix was never measured. It is so long that no
# task waits for it only to avoid a copy of its inputs.
_UNKNOWN_S: Final = 10 * RELUCTANCE_S


class Placement:
    """Chooses a device of a worker for each task, and counts the tasks on each; on its event loop.

    The slot of a task that says nothing is 1 of ``tasks_per_device``.
    """

    def __init__(self, admission: Admission, policy: Policy | None = None) -> None:
        self.admission = admission
        self.devices = tuple(admission.states)
        self._states, self._limits = admission.states, admission.limits
        self._tasks_per_device = admission.tasks_per_device
        self._policy = policy or start_soonest
        # The only device, if there is one and the policy has no choice.
        alone = self._policy is start_soonest and len(self.devices) == 1
        self.only = self.devices if alone else None
        self._durations_s: dict[str, float] = {}
        self._turn = 0
        self._memory_read_at = float("-inf")

    def place(self, request: Request, inputs: Sequence[Value] = ()) -> tuple[Device, ...]:
        """Return the devices that a task runs on; ``inputs`` are read only if there is a choice."""
        if request is ANY_DEVICE:
            return (choose(self._policy, self._candidates(inputs, self.devices)),)
        if request.names:
            group = self._named_group(request.names)
        else:
            group = self._any_group(request, inputs)
        if request.nbytes:
            self._check_limits(request, group)
        return group

    def add(self, claim: Claim) -> bool:
        """Count a task on its devices, until :meth:`remove`; return whether it waits for others."""
        self._turn += 1
        claim.counted = True
        claim.expected_s = claim.slots * self._durations_s.get(claim.prefix, _UNKNOWN_S)
        for device in claim.devices:
            state = self._states[device]
            state.last_turn = self._turn
            if not state.tasks:
                state.since = monotonic()
            state.tasks += 1
            state.busy_s += claim.expected_s
        return self._states[claim.devices[0]].tasks > self._tasks_per_device

    def remove(self, claim: Claim, seconds: float | None = None) -> None:
        """Stop counting a task; learn how long tasks of its prefix run, if it ran.

        A second call does nothing: the task seceded, and ended later.
        """
        if not claim.counted:
            return
        claim.counted = False
        for device in claim.devices:
            state = self._states[device]
            state.tasks -= 1
            state.busy_s -= claim.expected_s
            state.used_s += seconds or 0.0
            if not state.tasks:
                state.busy_s = 0.0
                state.occupied_s += monotonic() - state.since
        if seconds is not None:
            known = self._durations_s.get(claim.prefix, seconds)
            self._durations_s[claim.prefix] = known + _NEW_DURATION_WEIGHT * (seconds - known)

    def share_of(self, request: Request, device: Device) -> int:
        """Return the part of a device that a request takes, in millionths.

        A request that does not say takes a slot. If it reserves a smaller part of the device's
        memory, it takes this part.
        """
        share, limit = request.share, self._limits.get(device)
        if share is None:
            share = 1 / self._tasks_per_device
            if request.nbytes is not None and limit:
                share = min(request.nbytes / limit, share)
        return max(int(share * WHOLE + 1e-6), 1)  # rounded down: n shares of 1/n fit on a device

    # -- any device

    def _candidates(self, inputs: Sequence[Value], devices: Sequence[Device]) -> list[Candidate]:
        """Return the state of the devices that a task could get a part of."""
        now = monotonic()
        if now - self._memory_read_at > _MEMORY_AGE_S:
            self._memory_read_at = now
            for state in self._states.values():
                found = discovery.memory_info(driver.backend(), state.device.info)
                state.free_memory = None if found is None else found[0]
        moves, move_nbytes = self._moves(inputs)
        at_once = self._tasks_per_device
        return [
            Candidate(
                device=state.device,
                queued=state.tasks,
                busy_s=state.busy_s / at_once,
                move_nbytes=move_nbytes[state.device],
                since=self._turn - state.last_turn,
                free_nbytes=state.free_memory,
                moves=moves[state.device],
                waits=state.tasks >= at_once,
            )
            for state in map(self._states.__getitem__, devices)
        ]

    def _moves(self, inputs: Iterable[Value]) -> tuple[dict[Device, int], dict[Device, int]]:
        """Return how many of the inputs each device lacks, and their bytes."""
        moves, nbytes = dict.fromkeys(self._states, 0), dict.fromkeys(self._states, 0)
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

    # -- several devices, and devices by name

    def _any_group(self, request: Request, inputs: Sequence[Value]) -> tuple[Device, ...]:
        if request.number is None:
            return self.devices
        if request.number > len(self.devices):
            raise self._not_enough(request.number)
        nbytes = request.nbytes or 0
        usable = [one for one in self.devices if self._limits.get(one, nbytes) >= nbytes]
        if request.number > len(usable):
            self._check_limits(request, self.devices)
        candidates = self._candidates(inputs, usable)
        if request.number == 1:
            return (choose(self._policy, candidates),)
        return choose_group(candidates, request.number)

    def _check_limits(self, request: Request, group: Sequence[Device]) -> None:
        nbytes = request.nbytes or 0
        low = {one: limit for one in group if (limit := self._limits.get(one, nbytes)) < nbytes}
        if low:
            have = ", ".join(f"{nbytes_text(n)} on {one.info}" for one, n in low.items())
            raise DevctxError(
                f"the task reserves {nbytes_text(nbytes)} of device memory (device_memory), and "
                f"can never have more than {have}. Reserve less, make the task's parts smaller, or "
                "raise device_memory_limit if the devices have more"
            )

    def _named_group(self, names: Sequence[object]) -> tuple[Device, ...]:
        group = []
        for name in names:
            try:
                group.append(Device(name))
            except TypeError:
                raise not_an_annotation(name) from None
        if len(set(group)) < len(group):
            named = ", ".join(map(str, group))
            raise ValueError(f"each of several devices is named once, got {named}")
        if self._states.keys() >= set(group):
            return tuple(group)
        if len(group) > 1:  # other workers may have the rest
            raise self._not_enough(len(group), group)
        raise no_device(
            names[0],
            [str(mine.info) for mine in self.devices],
            discovery.inventory(driver.backend()).visible_devices,
            f"The machine has {group[0].info}, which this worker does not use, and no other worker "
            "does among those that the task may run on (workers=, resources=). One that has just "
            "left is waited for (devctx.missing-device-timeout), one that has yet to join is not: "
            "call client.wait_for_workers(n), also after cluster.scale(n). Or the device failed: "
            "see report(client).failures",
        )

    def _not_enough(self, wanted: int, named: Sequence[Device] = ()) -> DevctxError:
        mine, asked = (", ".join(str(one.info) for one in some) for some in (self.devices, named))
        there = len(discovery.inventory(driver.backend()).devices)
        several = "n_workers=1" if named else f"devices_per_worker={wanted}, or n_workers=1"
        return DevctxError(
            f"the task asks for {wanted} devices at once{f' ({asked})' if named else ''}, and no "
            f"worker that it may run on has them: this one has {len(self.devices)} ({mine}), and "
            f"its machine {there}. The devices of a task belong to one worker: ask for fewer"
            f"{f', or start workers of more devices: {several}' if there >= wanted else ''}"
        )
