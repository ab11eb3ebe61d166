"""Which worker has which devices: what was announced, by every name that a task may use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from dask_devctx.cuda import naming
from dask_devctx.cuda.inventory import DeviceInfo, Inventory
from dask_devctx.cuda.naming import Name

# Any worker with devices has one that is current.
_CURRENT = Name("current")
# How long a UUID is with nothing before it; what is longer is no prefix that is worth a search.
_WHOLE_UUID = 36
# A worker that starts may announce its devices before it joins: how many such announcements are
# kept, and for how long.
_EARLY_LIMIT = 1000
_EARLY_S = 300.0


@dataclass(frozen=True)
class Holdings:
    """What one worker said of its devices.

    Parameters
    ----------
    seen
        The devices that its process sees: ordinals are positions in it.
    used
        The UUIDs of those that it uses.
    """

    seen: Inventory
    used: frozenset[str]

    def have(self, name: Name) -> bool:
        """Return whether the worker uses the device; the one that is current is any worker's."""
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
        """Yield the names that are no prefixes."""
        yield _CURRENT
        for ordinal, info in self._used():
            yield from _exact_names(ordinal, info)

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
    """Workers and what they have, found by worker and by the devices' names."""

    def __init__(self) -> None:
        self.by_worker: dict[str, Holdings] = {}
        # Those of them that use devices at all.
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

    def holders(self, name: Name) -> set[str]:
        """Return the addresses of the workers that have a device, in a set of the caller's own."""
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

    def has(self, name: Name) -> bool:
        """Return whether any worker has the device."""
        return name in self._by_name or bool(self.holders(name))


@dataclass
class Cluster:
    """The workers, and what is known of their devices. Addresses are the scheduler's.

    Attributes
    ----------
    workers
        Those that have joined.
    present
        What those of them have that said so.
    left
        What workers had that left, for as long as they may come back.
    unheard
        Workers that joined without having said yet what they have, and when.
    """

    workers: set[str]
    present: Index = field(default_factory=Index)
    left: Index = field(default_factory=Index)
    unheard: dict[str, float] = field(default_factory=dict)
    _left_at: dict[str, float] = field(default_factory=dict)
    _early: dict[str, tuple[Holdings, float]] = field(default_factory=dict)

    def join(self, address: str, now: float) -> Holdings | None:
        """Count a worker in; return what it has if it said so before it joined."""
        self.workers.add(address)
        self._forget_left(address)
        self._expire_early(now)
        if address not in self._early:
            self.unheard[address] = now
            return None
        holdings, _ = self._early.pop(address)
        self.present.add(address, holdings)
        return holdings

    def leave(self, address: str, now: float) -> Holdings | None:
        """Count a worker out; return what it had."""
        self.workers.discard(address)
        self.unheard.pop(address, None)
        holdings = self.present.remove(address)
        if holdings is not None:
            self.left.add(address, holdings)
            self._left_at[address] = now
        return holdings

    def announce_early(self, address: str, holdings: Holdings, now: float) -> None:
        """Remember what a worker has that is to join yet."""
        self._early.pop(address, None)
        self._early[address] = holdings, now
        self._expire_early(now)

    def announce(self, address: str, holdings: Holdings) -> Holdings | None:
        """Note what a worker has that has joined; return what it had until now."""
        self.unheard.pop(address, None)
        before = self.present.remove(address)
        self.present.add(address, holdings)
        return before

    def withdraw(self, address: str) -> Holdings | None:
        """Note that a worker stays and uses no devices any more; return what it had."""
        return self.present.remove(address)

    def expire(self, before: float) -> bool:
        """Wait no longer for workers that left or joined before a time; return if any did."""
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
