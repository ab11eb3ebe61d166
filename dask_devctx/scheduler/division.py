"""The division of devices among the workers of one cluster, which the scheduler decides."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.metrics import time

from dask_devctx.dask_internals.scheduler import registered_plugin

# How long the workers of a cluster wait for the others that a plugin was registered on.
_REGISTERING_S = 20.0
# The devices of a worker that never joined are free after this time.
_JOINING_S = 60.0


class Claim(NamedTuple):
    """The UUIDs that a worker may use, and how many of them it wants; None for a fair part."""

    candidates: Sequence[str]
    number: int | None = None
    before: Collection[str] = ()  # that it had until now
    name: object = None  # of the worker


def divide(claims: Mapping[str, Claim], taken: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the UUIDs of each worker: evenly, each to one worker, and with few changes.

    A worker that wants a number of devices gets all of these, or none.
    """
    gone, shares = set(taken), {one: list[str]() for one in claims}
    owned = set().union(*(claim.before for claim in claims.values()))
    wishes: dict[str, list[str]] = {}
    for n, (one, claim) in enumerate(claims.items()):
        # The parts of workers that see the same devices begin at different ones.
        first = 0 if claim.number else -(-n * len(claim.candidates) // len(claims))
        turned = [*claim.candidates[first:], *claim.candidates[:first]]
        own = [uuid for uuid in turned if uuid in claim.before]
        new = [uuid for uuid in turned if uuid not in owned]
        wishes[one] = list(dict.fromkeys((*own, *new, *turned)))
    fewest = sorted(claims, key=lambda one: len(wishes[one]))  # first: others have more choice
    for one in fewest:
        count = claims[one].number or 0
        found = [uuid for uuid in wishes[one] if uuid not in gone][:count]
        if len(found) == count:
            shares[one] += found
            gone.update(found)
    open_ = [one for one in fewest if not claims[one].number]
    while open_:
        one = min(open_, key=lambda one: len(shares[one]))
        if free := [uuid for uuid in wishes[one] if uuid not in gone]:
            shares[one].append(free[0])
            gone.add(free[0])
        else:
            open_.remove(one)
    return shares


class _Share(NamedTuple):
    name: object  # of the worker
    uuids: Collection[str]
    since: float  # when it got them; for a worker that left, when it did


class Sharing:
    """Divides devices among workers: each keeps its own until it leaves or gets another plugin.

    A device is known by its UUID, so workers in containers that see the same device share it out,
    too. The workers that a plugin is registered on share evenly; one that joins later gets free
    devices. Those of a worker that left are kept ``grace_s`` for one that takes its place.
    """

    def __init__(self, scheduler: Scheduler, grace_s: float) -> None:
        self._scheduler, self._grace_s = scheduler, grace_s
        self._shares: dict[str, _Share] = {}  # by address
        self._left: list[_Share] = []
        self._plugin: object = None  # the latest that was registered on all workers
        # The claims that wait for the workers that are missing.
        self._claims: dict[str, Claim] = {}
        self._missing: set[str] = set()
        self._answer: asyncio.Future[dict[str, Any]] | None = None

    async def claim(
        self,
        address: str,
        name: object,
        plugin: str,
        candidates: Sequence[str],
        count: int | None,
    ) -> dict[str, Any]:
        """Return the ``uuids`` of a worker, maybe none, and by UUID the ``holders`` of others."""
        loop = asyncio.get_running_loop()
        answer = self._answer = self._answer or loop.create_future()
        registered = registered_plugin(self._scheduler, plugin)
        if registered is not None and registered is not self._plugin:
            self._plugin = registered
            self._missing.update(self._scheduler.workers)
            self._left.clear()
            loop.call_later(_REGISTERING_S, self._divide, answer)
        self._claims[address] = Claim(candidates, count, name=name)
        self.heard(address)
        shares = await asyncio.shield(answer)
        holders = {
            uuid: f"worker {share.name}"
            for other, share in self._shares.items()
            for uuid in share.uuids
            if other != address
        }
        return {"uuids": shares.get(address, ()), "holders": holders}

    def heard(self, address: str) -> None:
        """Note that a worker is not waited for any longer."""
        self._missing.discard(address)
        if self._answer is not None and not self._missing:
            self._divide(self._answer)

    def left(self, address: str, *, may_return: bool) -> None:
        """Note that a worker uses no devices from now on; they are kept if it may return."""
        share = self._shares.pop(address, None)
        if share is not None and may_return:
            self._left.append(share._replace(since=time()))
        self._claims.pop(address, None)
        self.heard(address)

    def _divide(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        if answer is not self._answer:
            return  # the others came in time
        now, there = time(), self._scheduler.workers
        self._left = [one for one in self._left if now - one.since < self._grace_s]
        for address, share in list(self._shares.items()):
            if address not in there and now - share.since > _JOINING_S:
                del self._shares[address]
        claims, self._claims = self._claims, {}
        self._missing.clear()
        self._answer = None
        claims = {address: self._as_before(address, claim) for address, claim in claims.items()}
        shares = divide(claims, self._taken())
        for address, uuids in shares.items():
            if uuids:
                self._shares[address] = _Share(claims[address].name, uuids, now)
        answer.set_result(shares)

    def _taken(self) -> set[str]:
        return set().union(*(one.uuids for one in (*self._shares.values(), *self._left)))

    def _as_before(self, address: str, claim: Claim) -> Claim:
        """Let a worker have its own devices, or those of workers whose place it takes."""
        share = self._shares.pop(address, None)
        if share is not None:
            return claim._replace(before=share.uuids)
        before: set[str] = set()
        free = set(claim.candidates) - self._taken()
        for one in sorted(self._left, key=lambda one: one.name != claim.name):
            theirs = set(claim.candidates).intersection(one.uuids)
            if theirs and (one.name == claim.name or len(free) < (claim.number or 1)):
                self._left.remove(one)
                before |= theirs
                free |= theirs
        if before and claim.number is None:
            mine = [uuid for uuid in claim.candidates if uuid in before]
            claim = claim._replace(candidates=mine)
        return claim._replace(before=before)
