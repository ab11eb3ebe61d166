"""The scheduler divides a machine's devices among the processes of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dask_devctx.scheduler.sharing import Claim, Sharing, divide

ALL = ("a", "b", "c", "d")


class Workers:
    """The workers of a scheduler, and the devices that each was told last."""

    def __init__(self, grace_s: float = 60) -> None:
        self.told: dict[str, list[str]] = {}
        self.addresses: dict[str, Any] = {}
        self.sharing = Sharing(self.tell, self.addresses, grace_s)

    async def tell(self, address: str, uuids: Sequence[str], version: int) -> None:
        self.told[address] = list(uuids)

    async def join(self, name: str, wanted: Sequence[str] = ALL, process: str = "") -> list[str]:
        self.addresses[name] = None
        answer = await self.sharing.claim(name, process or f"process of {name}", wanted)
        if answer["uuids"]:
            self.told[name] = answer["uuids"]
        return list(answer["uuids"])

    def leave(self, name: str) -> None:
        del self.addresses[name], self.told[name]
        self.sharing.left(name, may_return=True)


def test_each_that_joins_gets_its_part_of_what_others_have() -> None:
    async def body() -> None:
        workers = Workers()
        assert await workers.join("one") == ["a", "b", "c", "d"]
        assert await workers.join("two") == ["c", "d"]
        assert workers.told == {"one": ["a", "b"], "two": ["c", "d"]}
        await workers.join("three")
        assert workers.told == {"one": ["a", "b"], "two": ["c"], "three": ["d"]}
        await workers.join("four")
        assert workers.told == {"one": ["a"], "two": ["c"], "three": ["d"], "four": ["b"]}
        before = dict(workers.told)
        assert await workers.join("five") == []
        assert workers.told == before

    asyncio.run(body())


def test_a_worker_that_is_restarted_gets_the_devices_that_it_had() -> None:
    async def body() -> None:
        workers = Workers()
        for name in ("one", "two", "three"):
            await workers.join(name)
        before = dict(workers.told)
        workers.leave("two")
        assert await workers.join("again") == before["two"]
        assert workers.told == {"one": ["a", "b"], "again": ["c"], "three": ["d"]}

    asyncio.run(body())


def test_devices_of_one_that_stays_away_go_to_the_others() -> None:
    async def body() -> None:
        workers = Workers(grace_s=0)
        for name in ("one", "two"):
            await workers.join(name)
        workers.leave("one")
        await workers.sharing.even_out()
        assert workers.told == {"two": ["a", "b", "c", "d"]}

    asyncio.run(body())


def test_workers_of_one_process_have_the_same_devices() -> None:
    async def body() -> None:
        workers = Workers()
        await workers.join("one", process="p")
        assert await workers.join("two", process="p") == ["a", "b", "c", "d"]
        assert await workers.join("three") == ["c", "d"]
        assert workers.told["one"] == workers.told["two"] == ["a", "b"]

    asyncio.run(body())


def test_one_that_does_not_answer_does_not_stop_the_others() -> None:
    async def body() -> None:
        workers = Workers()
        await workers.join("one")

        async def fails(*args: object) -> None:
            raise OSError("it ended just now")

        workers.sharing._tell = fails  # type: ignore[method-assign]
        assert await workers.join("two") == ["c", "d"]

    asyncio.run(body())


@given(st.lists(st.sets(st.sampled_from(ALL), min_size=1), min_size=1, max_size=5), st.data())
def test_any_division(wanted: list[set[str]], data: st.DataObject) -> None:
    owners = {uuid: data.draw(st.integers(0, len(wanted) - 1)) for uuid in ALL}
    claims = {
        str(n): Claim(
            n,
            0.0,
            {str(n): tuple(sorted(uuids))},
            tuple(uuid for uuid in sorted(uuids) if owners[uuid] == n),
        )
        for n, uuids in enumerate(wanted)
    }
    shares = divide(claims)
    given_out = [uuid for share in shares.values() for uuid in share]
    assert sorted(given_out) == sorted(set().union(*wanted)), "each to one process, and all"
    for name, share in shares.items():
        assert set(share) <= set(claims[name].candidates)
    if len({frozenset(uuids) for uuids in wanted}) == 1:
        sizes = [len(share) for share in shares.values()]
        assert max(sizes) - min(sizes) <= 1
