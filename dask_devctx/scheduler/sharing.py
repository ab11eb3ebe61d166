"""The division of devices among the workers of one cluster, which the scheduler decides."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distributed.metrics import time

logger = logging.getLogger(__name__)

# A claim of a worker that never joined ends after this time.
_JOINING_S = 60.0

# Given a worker's address, its process's devices and their version, tells the worker about them.
Tell = Callable[[str, Sequence[str], int], Awaitable[object]]


@dataclass
class Claim:
    """The devices that a process may use, by its workers' addresses, and those that it has.

    The first claim in ``order`` came first; ``at`` is the time of its latest message. A claim whose
    last worker left is kept for a while, for the worker that a nanny starts in its place.
    """

    order: int
    at: float
    wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    left_at: float | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        """The UUIDs that any of its workers may use."""
        return tuple(dict.fromkeys(itertools.chain(*self.wanted.values())))


def divide(claims: Mapping[str, Claim]) -> dict[str, tuple[str, ...]]:
    """Return the UUIDs of each process: evenly, each to one process, and with few changes."""
    shares: dict[str, list[str]] = {process: [] for process in claims}
    owners = {uuid: process for process, claim in claims.items() for uuid in claim.held}
    taken: set[str] = set()
    open_ = set(claims)
    while open_:
        process = min(
            open_, key=lambda p: (len(shares[p]), len(claims[p].candidates), claims[p].order)
        )
        free = [uuid for uuid in claims[process].candidates if uuid not in taken]
        own = [uuid for uuid in free if owners.get(uuid) == process]
        unowned = [uuid for uuid in free if uuid not in owners]
        if not free:
            open_.remove(process)
            continue
        uuid = [*own, *unowned, *reversed(free)][0]  # the first devices of a process stay with it
        taken.add(uuid)
        shares[process].append(uuid)
    return {
        process: tuple(uuid for uuid in claims[process].candidates if uuid in share)
        for process, share in shares.items()
    }


class Sharing:
    """Divides devices among the processes of a cluster, and tells their workers of changes.

    A device is known by its UUID. So workers in containers that see the same device share it out,
    too, although they may have different lock directories. The devices of a worker that left are
    kept ``grace_s`` for a worker that takes its place.
    """

    def __init__(self, tell: Tell, workers: Mapping[str, Any], grace_s: float) -> None:
        self._grace_s = grace_s
        self._tell = tell
        self._workers = workers
        self._claims: dict[str, Claim] = {}
        self._counter = itertools.count(1)
        self._lock = asyncio.Lock()

    async def claim(self, address: str, process: str, candidates: Sequence[str]) -> dict[str, Any]:
        """Return the devices of a worker's process; other processes give up some for it.

        ``uuids`` are none if there are more processes than devices, and ``holders`` then has an
        address by UUID. Workers of one process use the same devices.
        """
        async with self._lock:
            self._forget_absent(address)
            claims = dict(self._claims)
            mine = claims.pop(process, None) or _taken_over(claims, candidates)
            if mine is None or mine.left_at is not None:
                held = mine.held if mine else ()
                mine = Claim(mine.order if mine else next(self._counter), time(), held=held)
            wanted = {**mine.wanted, address: tuple(candidates)}
            claims[process] = replace(mine, at=time(), wanted=wanted)
            shares = divide(claims)
            if not all(shares.values()):
                holders = {
                    uuid: next(iter(claim.wanted), "a worker")
                    for claim in self._claims.values()
                    for uuid in claim.held
                }
                return {"uuids": [], "version": 0, "holders": holders}
            self._claims = claims
            version = await self._apply(shares, but=address)
            return {"uuids": list(shares[process]), "version": version, "holders": {}}

    def left(self, address: str, *, may_return: bool) -> None:
        """Note that a worker left; its devices are kept if it may return, with another address."""
        for process, claim in list(self._claims.items()):
            if address not in claim.wanted:
                continue
            if len(claim.wanted) > 1:
                del claim.wanted[address]
            elif may_return:
                claim.left_at = time()
            else:
                del self._claims[process]

    async def even_out(self) -> None:
        """Divide the devices that workers left behind."""
        async with self._lock:
            self._forget_absent()
            for process, claim in list(self._claims.items()):
                if claim.left_at is not None and time() - claim.left_at >= self._grace_s:
                    del self._claims[process]
            await self._apply(divide(self._claims))

    async def _apply(self, shares: Mapping[str, tuple[str, ...]], but: str = "") -> int:
        """Tell all workers of changed processes, first those that give up devices."""
        version = next(self._counter)
        less: list[str] = []
        more: list[str] = []
        for process, share in shares.items():
            claim = self._claims[process]
            if share != claim.held:
                (less if set(claim.held) - set(share) else more).append(process)
                claim.held = share
        for processes in (less, more):
            # Workers may have left while others were told.
            claims = [(one, self._claims[one]) for one in processes if one in self._claims]
            told = {
                address: self._tell(address, shares[process], version)
                for process, claim in claims
                for address in claim.wanted
                if address != but and claim.left_at is None
            }
            answers = await asyncio.gather(*told.values(), return_exceptions=True)
            for address, answer in zip(told, answers, strict=True):
                if isinstance(answer, Exception):  # it may have ended just now
                    logger.debug("%s was not told of its devices: %r", address, answer)
        return version

    def _forget_absent(self, but: str = "") -> None:
        """Forget workers that never came."""
        for claim in list(self._claims.values()):
            if claim.left_at is None and time() - claim.at > _JOINING_S:
                for address in claim.wanted.keys() - self._workers.keys() - {but}:
                    self.left(address, may_return=False)


def _taken_over(claims: dict[str, Claim], candidates: Sequence[str]) -> Claim | None:
    """Take out the claim of a process that ended, if it held some of the candidates."""
    for process, claim in claims.items():
        if claim.left_at is not None and set(claim.held) & set(candidates):
            return claims.pop(process)
    return None
