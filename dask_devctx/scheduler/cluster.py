"""The workers of a cluster and their devices, as each worker announces them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import Inventory, Name

# Any worker with devices has one that is current.
_CURRENT = Name("current")
# The lengths of a whole UUID, without and with "GPU-". Others may be a prefix.
_WHOLE_UUID = (36, 40)
# A worker that starts may announce its devices before it joins; so many such announcements are
# kept.
_EARLY_LIMIT = 1000


class Wanted(NamedTuple):
    """The devices that a task asks one worker for, and the bytes on each of them.

    ``number`` is None for all of the worker's devices; ``nbytes`` is 0 where none are reserved.
    """

    names: tuple[Name, ...]
    number: int | None
    nbytes: int


@dataclass(frozen=True)
class WorkerDevices:
    """The devices that a worker's process sees, in the order of their ordinals, and their use.

    ``used`` has the bytes that tasks may have on each device that it uses, by the device's UUID.
    """

    seen: Inventory
    used: Mapping[str, int]

    @cached_property
    def names(self) -> frozenset[Name]:
        """The names of the devices in use, without prefixes of UUIDs."""
        names = {_CURRENT}
        for ordinal, info in enumerate(self.seen.devices):
            if info.uuid in self.used:
                uuid = info.uuid.lower()
                names |= {Name("uuid", uuid), Name("uuid", uuid[len("GPU-") :])}
                names |= {Name("ordinal", ordinal), Name("pci", info.pci_bus_id or "")}
        return frozenset(names)

    def has(self, name: Name) -> bool:
        """Return whether the worker uses a device; every worker has the current device."""
        if name in self.names:
            return True
        if name.kind != "uuid" or len(str(name.value)) in _WHOLE_UUID:
            return False
        found = naming.among(name, self.seen)
        return len(found) == 1 and found[0].uuid in self.used

    def have(self, wanted: Wanted) -> bool:
        """Return whether the worker has all devices and bytes that a task asks for."""
        if not all(map(self.has, wanted.names)):
            return False
        if wanted.names and not wanted.nbytes:
            return True
        found = [naming.among(name, self.seen)[:1] for name in wanted.names]
        uuids = {info.uuid for infos in found for info in infos} or self.used
        fit = sum(self.used[uuid] >= wanted.nbytes for uuid in uuids)
        return fit >= (wanted.number or max(len(uuids), 1))


@dataclass
class Cluster:
    """The workers that have joined, by the scheduler's addresses, and what is known of devices."""

    workers: set[str] = field(default_factory=set)
    present: dict[str, WorkerDevices] = field(default_factory=dict)
    # Of workers that left and may come back, with the time.
    left: dict[str, tuple[WorkerDevices, float]] = field(default_factory=dict)
    # The workers that have not announced their devices yet, with the time of joining.
    unheard: dict[str, float] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)  # the workers that told of late tasks
    ahead: int = 0  # how many tasks the workers get beside those that their devices run
    _early: dict[str, WorkerDevices] = field(default_factory=dict)

    def join(self, address: str, now: float) -> None:
        """Add a worker that joins; it may have announced its devices before."""
        self.workers.add(address)
        self.left.pop(address, None)
        if address in self._early:
            self.present[address] = self._early.pop(address)
        else:
            self.unheard[address] = now

    def leave(self, address: str, now: float) -> None:
        """Remove a worker that leaves; it may come back."""
        self.workers.discard(address)
        self.unheard.pop(address, None)
        devices = self.present.pop(address, None)
        if devices is not None:
            self.left[address] = devices, now

    def announce(self, address: str, devices: WorkerDevices) -> None:
        """Note the devices of a worker."""
        if address in self.workers:
            self.unheard.pop(address, None)
            self.present[address] = devices
            return
        self._early[address] = devices
        if len(self._early) > _EARLY_LIMIT:
            del self._early[next(iter(self._early))]

    def withdraw(self, address: str) -> None:
        """Note that a worker stays but uses no devices from now on."""
        self.present.pop(address, None)
        if not self.slots:
            self.left.clear()  # the plugin was removed, and no device comes back

    @property
    def slots(self) -> dict[str, int]:
        """How many devices each worker uses, of those that use any."""
        return {one: len(devices.used) for one, devices in self.present.items() if devices.used}

    def having(self, wanted: Wanted) -> set[str]:
        """Return the workers that have the devices."""
        return {address for address, devices in self.present.items() if devices.have(wanted)}

    def expire(self, before: float) -> bool:
        """Forget workers that left or joined before a time; return whether there were any."""
        known = len(self.unheard) + len(self.left)
        self.unheard = {one: since for one, since in self.unheard.items() if since > before}
        self.left = {one: gone for one, gone in self.left.items() if gone[1] > before}
        return len(self.unheard) + len(self.left) < known


def device_names(devices: Iterable[tuple[str, int, str]]) -> dict[str, str]:
    """Return a short name for each device, by its UUID; a part of the UUID where names clash.

    >>> device_names([("a", 0, "GPU-3807"), ("a", 0, "GPU-b93a"), ("b", 0, "GPU-c1")])
    {'GPU-3807': 'cuda:0 GPU-3807', 'GPU-b93a': 'cuda:0 GPU-b93a', 'GPU-c1': 'cuda:0'}
    """
    known = {uuid: (host, ordinal) for host, ordinal, uuid in devices}
    shared = Counter(known.values())
    length = 8  # "GPU-" and four digits tell two devices apart, mostly
    while length < 40 and len({uuid[:length] for uuid in known}) < len(known):
        length += 4
    return {
        uuid: (f"cuda:{place[1]}" if place[1] >= 0 else uuid[:12])
        + (f" {uuid[:length]}" if shared[place] > 1 and place[1] >= 0 else "")
        for uuid, place in known.items()
    }
