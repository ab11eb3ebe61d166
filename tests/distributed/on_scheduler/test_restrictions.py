"""Restrictions that are kept up to date are those that would be made from the beginning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dask_devctx.annotations import Request
from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.scheduler.cluster import Cluster, WorkerDevices
from dask_devctx.scheduler.division import Claim, divide
from dask_devctx.scheduler.restrictions import Restrictions

ADDRESSES = [f"tcp://10.0.0.{n}:1" for n in range(3)]
UUIDS = [f"GPU-{n % 2}33ebc8{n}-95a3-9648-c914-5259efe7a11e" for n in range(4)]
HOSTS = {"even": set(ADDRESSES[::2]), "odd": set(ADDRESSES[1::2])}
NOBODY = {"devctx://waiting-for-the-device"}
ONE = [
    *UUIDS, *(uuid[4:].upper() for uuid in UUIDS), UUIDS[0][:6], "GPU-1", "GPU-f", 0, 1, "cuda:2",
    7, "0000:01:00.0", "banana", 1.5, "cuda",
]  # fmt: skip
NAMES = [
    *(Request((name,)) for name in ONE),
    Request(number=2), Request(number=3, nbytes=5), Request(number=None), Request((0, 1), 2),
    Request((UUIDS[0], 1), 2, nbytes=9), Request(("banana",), 1),
]  # fmt: skip

holdings = st.builds(
    lambda seen, used, limits: WorkerDevices(
        Inventory(
            tuple(DeviceInfo(n, uuid, pci_bus_id=f"0000:0{n}:00.0") for n, uuid in enumerate(seen))
        ),
        {uuid: limits[n] for n, uuid in enumerate(sorted(used & {*seen}))},
    ),
    st.permutations(UUIDS).flatmap(lambda p: st.integers(0, 4).map(lambda n: p[:n])),
    st.sets(st.sampled_from(UUIDS)),
    st.lists(st.sampled_from([4, 7, 10, 1000]), min_size=4, max_size=4),
)
addresses = st.sampled_from(ADDRESSES)
tasks = st.fixed_dictionaries(
    {
        "wanted": st.sampled_from(NAMES),
        "workers": st.none() | st.sets(addresses, min_size=1),
        "hosts": st.none() | st.sets(st.sampled_from([*HOSTS, "nowhere"]), min_size=1),
        "loose": st.booleans(),
    }
)
events = st.one_of(
    st.tuples(st.just("submit"), tasks),
    st.tuples(st.just("submit"), st.sampled_from(NAMES).map(lambda name: {"wanted": name})),
    st.tuples(st.just("join"), addresses),
    st.tuples(st.just("arrive"), addresses, holdings),
    st.tuples(st.just("arrive"), addresses, holdings),
    st.tuples(st.just("leave"), addresses),
    st.tuples(st.just("announce"), addresses, holdings),
    st.tuples(st.just("withdraw"), addresses),
    st.tuples(st.just("wait"), st.integers(1, 3)),
    st.tuples(st.just("forget"), st.integers(0, 9)),
)


class Model:
    """A model of the scheduler's knowledge, with the restrictions of each task that follow."""

    def __init__(self) -> None:
        self.workers: set[str] = set()
        self.have: dict[str, WorkerDevices] = {}
        self.left: dict[str, tuple[WorkerDevices, int]] = {}
        self.unheard: dict[str, int] = {}
        self.early: dict[str, WorkerDevices] = {}

    def expected(self, said: dict[str, Any]) -> tuple[set[str], set[str] | None, bool]:
        workers, hosts = said.get("workers"), said.get("hosts")
        own = (workers or set(), hosts, said.get("loose", False))
        wanted = said["wanted"]
        targets = {a for a, held in self.have.items() if has(held, wanted)}
        if not targets:
            lost = any(has(held, wanted) for held, _ in self.left.values())
            unknown = any(name_of(one).kind == "unknown" for one in wanted.names)
            if not unknown and (lost or self.unheard):
                return NOBODY, None, False
            targets = {a for a, held in self.have.items() if held.used} or set(self.have)
        if not targets or targets == self.workers:
            return own
        if not workers and not hosts:
            return targets, None, False
        allowed = (workers or set()).union(*(HOSTS.get(host, set()) for host in hosts or ()))
        both = allowed & targets or (targets if said.get("loose") else set())
        return (both, None, False) if both else own


def name_of(wanted: Any) -> naming.Name:
    try:
        return naming.read(wanted)
    except TypeError:
        return naming.Name("unknown")


def has(held: WorkerDevices, wanted: Any) -> bool:
    """Return whether a worker has all that a task asks for."""
    if len(wanted.names) == 1 and wanted.nbytes is None:
        return held.has(name_of(wanted.name))
    uuids = set(held.used)
    if wanted.names:
        names = [name_of(one) for one in wanted.names]
        if not all(held.has(name) for name in names):
            return False
        uuids = {naming.among(name, held.seen)[0].uuid for name in names}
    fit = [uuid for uuid in uuids if held.used[uuid] >= (wanted.nbytes or 0)]
    if wanted.number is None:
        return 0 < len(uuids) == len(fit)
    return len(fit) >= wanted.number


def having(*uuids: str) -> WorkerDevices:
    infos = tuple(DeviceInfo(n, uuid) for n, uuid in enumerate(uuids))
    return WorkerDevices(Inventory(infos), dict.fromkeys(uuids, 1000))


def task_state(key: int, state: str, said: dict[str, Any]) -> Any:
    return SimpleNamespace(
        key=key,
        state=state,
        worker_restrictions=said.get("workers"),
        host_restrictions=said.get("hosts"),
        loose_restrictions=said.get("loose", False),
    )


_TWO_DEVICES = [
    ("arrive", ADDRESSES[0], having(UUIDS[0])),
    ("arrive", ADDRESSES[1], having(UUIDS[1])),
    ("submit", {"wanted": Request((UUIDS[0],))}),
]


@example(happening=[*_TWO_DEVICES, ("leave", ADDRESSES[1])])
@example(happening=[*_TWO_DEVICES, ("leave", ADDRESSES[0]), ("wait", 3)])
@example(happening=[*_TWO_DEVICES, ("announce", ADDRESSES[1], having(UUIDS[0]))])
@settings(max_examples=200)
@given(happening=st.lists(events, max_size=40))
def test_restrictions_are_as_if_made_from_the_beginning(happening: list[Any]) -> None:
    model, now = Model(), 0
    cluster = Cluster()
    restricted = Restrictions(cluster, lambda host: HOSTS.get(host, ()))
    known: dict[int, tuple[Any, dict[str, Any]]] = {}
    for number, (event, *what) in enumerate(happening):
        before = {key: restrictions(ts) for key, (ts, _) in known.items()}
        waiting: list[Any] | None = None
        if event == "submit":
            (said,) = what
            ts = task_state(number, "no-worker", said)
            restricted.note(ts, said["wanted"])
            known[number] = ts, said
        elif event == "forget":
            if known:
                key = list(known)[what[0] % len(known)]
                restricted.forget(key)
                del known[key], before[key]
        elif event == "wait":
            now += what[0]
            then = now - 2
            model.unheard = {a: since for a, since in model.unheard.items() if since > then}
            model.left = {a: entry for a, entry in model.left.items() if entry[1] > then}
            cluster.expire(then)
            waiting = restricted.review()
        else:
            steps = ["join", "announce"] if event == "arrive" else [event]
            moved = [change(model, cluster, restricted, step, now, *what) for step in steps]
            # what changes there and back in between may be looked at once more
            waiting = moved[0] if len(moved) == 1 else None
        for key, (ts, said) in known.items():
            assert restrictions(ts) == model.expected(said), (event, what, said)
            if waiting is not None:
                assert (ts in waiting) is (restrictions(ts) != before[key])


def change(
    model: Model,
    cluster: Cluster,
    restricted: Restrictions,
    event: str,
    now: int,
    address: str,
    *held: Any,
) -> list[Any] | None:
    there = address in model.workers
    if event == "join" and not there:
        model.workers.add(address)
        model.left.pop(address, None)
        if address in model.early:
            model.have[address] = model.early.pop(address)
        else:
            model.unheard[address] = now
        cluster.join(address, now)
    elif event == "leave" and there:
        model.workers.discard(address)
        model.unheard.pop(address, None)
        if address in model.have:
            model.left[address] = model.have.pop(address), now
        cluster.leave(address, now)
    elif event == "announce":
        if there:
            model.unheard.pop(address, None)
            model.have[address] = held[0]
        else:
            model.early[address] = held[0]
        cluster.announce(address, held[0])
    elif event == "withdraw" and there:
        model.have.pop(address, None)
        model.left = model.left if any(held.used for held in model.have.values()) else {}
        cluster.withdraw(address)
    else:
        return None
    return restricted.review()


def restrictions(ts: Any) -> tuple[set[str], set[str] | None, bool]:
    """Return copies: what dask is given changes."""
    hosts = ts.host_restrictions
    return (
        set(ts.worker_restrictions or ()),
        None if hosts is None else set(hosts),
        ts.loose_restrictions,
    )


@pytest.mark.parametrize(
    "asks",
    [lambda n: (f"GPU-{n:08x}", None), lambda n: (1, {f"tcp://10.0.0.1:{n}"})],
    ids=["devices", "restrictions"],
)
def test_what_no_task_asks_for_any_more_is_forgotten(asks: Any) -> None:
    cluster = Cluster()
    restricted = Restrictions(cluster, lambda host: ())
    cluster.join("tcp://10.0.0.1:1", 0)
    sizes = set()
    for n in range(4000):
        wanted, workers = asks(n)
        ts = task_state(n, "waiting", {"workers": workers})
        restricted.note(ts, Request((wanted,)))
        restricted.forget(n)
        if n % 100 == 0:
            sizes.add(len(restricted._by_terms))
    assert max(sizes) < 1200


# -- the division of a machine's devices


ALL = ("a", "b", "c", "d")


wishes = st.tuples(st.permutations(ALL), st.integers(1, 4), st.sampled_from([None, None, 1, 2, 3]))


@given(st.lists(wishes, min_size=1, max_size=5), st.sets(st.sampled_from(ALL)), st.data())
def test_any_division(wanted: list[Any], taken: set[str], data: st.DataObject) -> None:
    owners = {uuid: data.draw(st.integers(0, len(wanted) - 1)) for uuid in ALL}
    claims = {
        str(n): Claim(order[:seen], number, [uuid for uuid in order if owners[uuid] == n])
        for n, (order, seen, number) in enumerate(wanted)
    }
    shares = divide(claims, taken)
    given_out = [uuid for share in shares.values() for uuid in share]
    assert len(given_out) == len({*given_out} - taken), "each to one worker, and none twice"
    for name, share in shares.items():
        assert {*share} <= {*claims[name].candidates}
        if number := claims[name].number:
            assert len(share) in (0, number)
    parts = {name for name, claim in claims.items() if claim.number is None}
    if parts:
        left = {uuid for name in parts for uuid in claims[name].candidates} - taken - {*given_out}
        assert not left, "no device is left over"
    if len({frozenset(claims[name].candidates) for name in parts}) == 1:
        sizes = [len(shares[name]) for name in parts]
        assert max(sizes) - min(sizes) <= 1
