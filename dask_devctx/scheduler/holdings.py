"""The devices of each worker, as announced, found by every name that a task may use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dask_devctx.cuda import naming
from dask_devctx.cuda.inventory import DeviceInfo, Inventory
from dask_devctx.cuda.naming import Name

# Any worker with devices has one that is current.
_CURRENT = Name("current")
# The length of a UUID without "GPU-". A longer text is not searched for as a prefix.
_WHOLE_UUID = 36
# A worker that starts may announce its devices before it joins. This many such announcements are
# kept, for this long.
_EARLY_LIMIT = 1000
_EARLY_S = 300.0
# So many devices are named in the error of a task for another device.
_SHOWN = 32
# The devices of so many workers that left for good are remembered, for the errors of tasks.
_GONE_LIMIT = 20


class Several(NamedTuple):
    """A task's request to one worker that is not just for one device.

    Parameters
    ----------
    names
        The devices that it names; empty for any.
    number
        How many devices it asks for; None for all of the worker's.
    nbytes
        The bytes that it reserves on each; 0 for none.
    """

    names: tuple[Name, ...]
    number: int | None
    nbytes: int

    @property
    def kind(self) -> str:
        """Something else than any kind of :class:`~dask_devctx.cuda.naming.Name`."""
        return "several"


@dataclass(frozen=True)
class Holdings:
    """The devices of one worker, as it announced them.

    Parameters
    ----------
    seen
        The devices that its process sees. An ordinal is a position in this inventory.
    used
        The UUIDs of the devices that it uses.
    limits
        The bytes that tasks may have on a device, by its UUID; a device without an entry is
        unlimited.
    """

    seen: Inventory
    used: frozenset[str]
    limits: Mapping[str, int] = field(default_factory=dict)

    def have(self, name: Name | Several) -> bool:
        """Return whether the worker uses the device; every worker has the current device."""
        if isinstance(name, Several):
            return self._have_several(name)
        if name == _CURRENT:
            return True
        found = naming.among(name, self.seen)
        return len(found) == 1 and found[0].uuid in self.used

    def names(self) -> Iterator[Name]:
        """Yield the names by which tasks may ask for the worker's devices, prefixes included."""
        yield _CURRENT
        for ordinal, info in self._used():
            yield from _exact_names(ordinal, info)
            for value in naming.uuid_names(info.uuid):
                yield Name("uuid", value)

    def exact_names(self) -> Iterator[Name]:
        """Yield the names by which tasks may ask for the worker's devices, without prefixes."""
        yield _CURRENT
        for ordinal, info in self._used():
            yield from _exact_names(ordinal, info)

    def _have_several(self, several: Several) -> bool:
        wanted = self.used
        if several.names:
            if not all(map(self.have, several.names)):
                return False
            found = [naming.among(name, self.seen) for name in several.names]
            wanted = frozenset(info.uuid for infos in found for info in infos[:1])
        fit = sum(self.limits.get(uuid, several.nbytes) >= several.nbytes for uuid in wanted)
        return fit >= (several.number or max(len(wanted), 1))

    def _used(self) -> Iterator[tuple[int, DeviceInfo]]:
        return ((n, info) for n, info in enumerate(self.seen.devices) if info.uuid in self.used)


def _exact_names(ordinal: int, info: DeviceInfo) -> Iterator[Name]:
    uuid = info.uuid.lower()
    yield Name("ordinal", ordinal)
    yield Name("uuid", uuid)
    yield Name("uuid", uuid[len("GPU-") :])
    if info.pci_bus_id is not None:
        yield Name("pci", info.pci_bus_id)


class Index:
    """Workers and their devices, found by worker and by the devices' names."""

    def __init__(self) -> None:
        self.by_worker: dict[str, Holdings] = {}
        # The workers that use any devices.
        self.using: set[str] = set()
        self._by_name: defaultdict[Name, set[str]] = defaultdict(set)

    def add(self, address: str, holdings: Holdings) -> None:
        self.by_worker[address] = holdings
        if holdings.used:
            self.using.add(address)
        for name in holdings.exact_names():
            self._by_name[name].add(address)

    def remove(self, address: str) -> Holdings | None:
        holdings = self.by_worker.pop(address, None)
        if holdings is None:
            return None
        self.using.discard(address)
        for name in holdings.exact_names():
            self._by_name[name].discard(address)
            if not self._by_name[name]:
                del self._by_name[name]
        return holdings

    def holders(self, name: Name | Several) -> set[str]:
        """Return the addresses of the workers that have a device, as a new set."""
        if isinstance(name, Several):
            return {address for address in self.using if self.by_worker[address].have(name)}
        if (exact := self._by_name.get(name)) is not None:
            return set(exact)
        start = str(name.value)
        if name.kind != "uuid" or len(start) >= _WHOLE_UUID:
            return set()
        return {
            address
            for known, addresses in self._by_name.items()
            if known.kind == "uuid" and str(known.value).startswith(start)
            for address in addresses
            if self.by_worker[address].have(name)
        }

    def has(self, name: Name | Several) -> bool:
        """Return whether any worker has the device."""
        return bool(self.holders(name)) if isinstance(name, Several) else self._has_one(name)

    def _has_one(self, name: Name) -> bool:
        return name in self._by_name or bool(self.holders(name))


@dataclass
class Cluster:
    """The workers of a cluster, and their devices as far as they are known.

    Attributes
    ----------
    workers
        The workers that have joined, by the scheduler's addresses.
    present
        The devices of these workers, once a worker has announced them.
    left
        The devices of workers that left, as long as they may come back.
    unheard
        The workers that have joined but not announced their devices yet, with the time of joining.
    gone
        The devices of workers that left for good, by address; the latest of them.
    leaving
        The workers that are about to leave for good.
    """

    workers: set[str]
    present: Index = field(default_factory=Index)
    left: Index = field(default_factory=Index)
    unheard: dict[str, float] = field(default_factory=dict)
    gone: dict[str, Holdings] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    _left_at: dict[str, float] = field(default_factory=dict)
    _early: dict[str, tuple[Holdings, float]] = field(default_factory=dict)

    def join(self, address: str, now: float) -> Holdings | None:
        """Add a worker that joins; return its devices if it announced them before."""
        self.workers.add(address)
        self.leaving.discard(address)
        self._forget_left(address)
        self._expire_early(now)
        if address not in self._early:
            self.unheard[address] = now
            return None
        holdings, _ = self._early.pop(address)
        self.present.add(address, holdings)
        return holdings

    def leave(self, address: str, now: float, *, may_return: bool = True) -> Holdings | None:
        """Remove a worker that leaves; return its devices."""
        self.workers.discard(address)
        self.leaving.discard(address)
        self.unheard.pop(address, None)
        holdings = self.present.remove(address)
        if holdings is None:
            return None
        if may_return:
            self.left.add(address, holdings)
            self._left_at[address] = now
        else:
            self.gone[address] = holdings
            while len(self.gone) > _GONE_LIMIT:
                del self.gone[next(iter(self.gone))]
        return holdings

    def had(self, name: Name | Several) -> str | None:
        """Return the address of the last worker with a device, if it left for good."""
        return next((a for a, held in reversed(self.gone.items()) if held.have(name)), None)

    def shown(self) -> list[str]:
        """Return a description of each device that workers use; of the first of very many."""
        used = {
            (n, info.uuid): str(info)
            for held in self.present.by_worker.values()
            for n, info in held._used()
        }
        return [text for _, text in sorted(used.items())][:_SHOWN]

    def announce_early(self, address: str, holdings: Holdings, now: float) -> None:
        """Remember the devices of a worker that has not joined yet."""
        self._early.pop(address, None)
        self._early[address] = holdings, now
        self._expire_early(now)

    def announce(self, address: str, holdings: Holdings) -> Holdings | None:
        """Note the devices of a worker that has joined; return its devices until now."""
        self.unheard.pop(address, None)
        before = self.present.remove(address)
        self.present.add(address, holdings)
        return before

    def withdraw(self, address: str) -> Holdings | None:
        """Note that a worker stays but uses no devices from now on; return its devices."""
        return self.present.remove(address)

    def expire(self, before: float) -> bool:
        """Forget workers that left or joined before a time; return whether there were any."""
        unheard = [address for address, since in self.unheard.items() if since <= before]
        left = [address for address, since in self._left_at.items() if since <= before]
        for address in unheard:
            del self.unheard[address]
        for address in left:
            self._forget_left(address)
        return bool(unheard or left)

    def _expire_early(self, now: float) -> None:
        for address, (_, since) in list(self._early.items()):  # the oldest come first
            if since > now - _EARLY_S and len(self._early) <= _EARLY_LIMIT:
                break
            del self._early[address]

    def _forget_left(self, address: str) -> None:
        self._left_at.pop(address, None)
        self.left.remove(address)
