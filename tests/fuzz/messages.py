"""Targets that the network reaches: messages between workers and the scheduler."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from types import SimpleNamespace
from typing import Any

from distributed.core import coerce_to_address

from dask_devctx.annotations.runs import watched_run
from dask_devctx.scheduler import routing, suspects
from dask_devctx.scheduler.counts import Counts
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.messages import (
    ANNOUNCE,
    CLAIM,
    KEEP,
    REFUSE,
    WITHDRAW,
    Division,
    MalformedError,
    read,
)
from dask_devctx.scheduler.routing import DeviceRouting
from dask_devctx.scheduler.rows import KINDS
from dask_devctx.transfer.ipc import messages as ipc_messages
from dask_devctx.transfer.ipc.messages import (
    PROTOCOL,
    Close,
    Hello,
    MalformedMessageError,
    Next,
    Place,
    Refused,
    Shown,
)
from dask_devctx.worker.metrics.history import History
from tests.fuzz.inputs import UUIDS, anything, replaced, text

HEALTHY, OTHER = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


class Anything:
    """The parts of a scheduler that no message reaches: calls, attributes and entries of it."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: object) -> Any:
        return self


@functools.cache
def scheduler() -> tuple[Any, DeviceRouting]:
    """Return a scheduler with two workers, one of which never changes, and its routing."""
    logging.getLogger(routing.__name__).setLevel(logging.ERROR)
    logging.getLogger(suspects.__name__).setLevel(logging.ERROR)
    made: Any = Anything()
    made.workers = {
        address: SimpleNamespace(name=address, address=address, host="h", has_what=())
        for address in (HEALTHY, OTHER)
    }
    made.tasks, made.host_info, made.handlers = {}, {}, dict.fromkeys(("processing", "unregister"))
    made.coerce_address, made.allowed_failures = coerce_to_address, 3
    plugin = DeviceRouting()
    asyncio.run(plugin.start(made))
    seen = [{"device_id": 0, "uuid": UUIDS[3]}]
    assert made.handlers[ANNOUNCE](address=HEALTHY, seen=seen, used=[UUIDS[3]]) == "OK"
    return made, plugin


def message(chance: random.Random) -> dict[str, Any]:
    """Return a correct message with some parts replaced."""

    def or_else(value: Any, likely: float = 0.9) -> Any:
        return value if chance.random() < likely else anything(chance)

    count = chance.randint(0, 3)
    device = {"pci_bus_id": "0000:01:00.0"}
    seen = [
        or_else({**device, "device_id": or_else(n), "uuid": or_else(UUIDS[n])})
        for n in range(count)
    ]
    whole = {
        "address": or_else(chance.choice([OTHER, OTHER, "tcp://10.0.0.3:1"])),
        "seen": or_else(seen),
        "used": or_else([or_else(uuid) for uuid in UUIDS[: chance.randint(0, count)]]),
        "kind": or_else(
            chance.choice(["DevicesInUseError", "LockDirectoryError", "WorkerSetupError"])
        ),
        "unannotated": or_else(chance.choice(["assign", "leave"])),
        "place": or_else(chance.choice([1, 0.5])),
        "left": or_else({uuid: or_else([or_else(0.5), None]) for uuid in UUIDS[:count]}),
        "keys": or_else(["key", or_else("other")]),
        "arguments": or_else(chance.choice([[1, ["cuda:0"], {}], ["/tmp", "is none"], [2]])),
        chance.choice(["more", text(chance)]): anything(chance),
    }
    return {name: value for name, value in whole.items() if chance.random() < 0.95}


def fuzz_messages_to_the_scheduler(chance: random.Random) -> str:
    made, plugin = scheduler()
    op = chance.choice([ANNOUNCE, ANNOUNCE, WITHDRAW, REFUSE, KEEP])
    answer = made.handlers[op](**message(chance))
    if op == KEEP and isinstance(answer, dict):
        answer = "OK" if answer == {"elsewhere": []} else str(answer)
    assert answer == "OK" or answer.startswith("refused: "), answer
    ts = SimpleNamespace(
        key="key", annotations={"device": UUIDS[3]}, run_spec=None, actor=False, state="released",
        worker_restrictions=None, host_restrictions=None, loose_restrictions=False, priority=(0,),
    )  # fmt: skip
    made.tasks["key"] = ts
    plugin.update_graph(made, tasks=["key"], annotations={"device": {"key": UUIDS[3]}})
    plugin.transition("key", "released", "forgotten")
    assert HEALTHY in ts.worker_restrictions
    return "refused" if answer != "OK" else "accepted"


FIELDS = ["cuda:0", UUIDS[0], "CUDA_ERROR_ASSERT", 710, ["key on cuda:0"]]
FIELDS += [False, False, False, ""]


def fuzz_failures(chance: random.Random) -> str:
    made, plugin = scheduler()
    ts = SimpleNamespace(key="key", annotations=None, who_has=set(), actor=False, state="released")
    made.tasks = {"key": ts}

    def or_else(value: Any) -> Any:
        return value if chance.random() < 0.93 else anything(chance)

    told = {
        "action": or_else(suspects.ACTION),
        "worker": or_else(OTHER),
        "address": or_else(OTHER),
        "fields": or_else([or_else(field) for field in FIELDS]),
        **{
            name: or_else([or_else("key") for _ in range(chance.randint(0, 3))])
            for name in ("suspects", "bystanders", "erred")
        },
    }
    if chance.random() < 0.5:
        made.handlers[suspects.FAILED](**told)
    else:
        plugin.log_event(or_else(suspects.TOPIC), or_else(told))
    plugin._suspects.worker_left(OTHER)
    run, most = watched_run(ts.annotations)
    assert (run, most) in ((0, 0), (1, 3)), ts.annotations
    return "marked" if ts.annotations else "left"


def fuzz_messages_between_workers(chance: random.Random) -> str:
    def or_else(value: Any, likely: float = 0.9) -> Any:
        return value if chance.random() < likely else anything(chance)

    numbers = tuple(or_else(n) for n in range(chance.randint(0, 3)))
    place = Place(1, or_else(b"h" * 64), or_else(0), or_else(256))
    right: Any = chance.choice(
        [
            Hello(PROTOCOL, OTHER, "process", "host"),
            Shown("ipc:memory", or_else(place), b"content"),
            Refused("reason", passes=True),
            Next("ipc:memory", 1, chance.randint(0, 3), chance.randint(0, 3)),
            Close("ipc:memory", or_else(numbers)),
        ]
    )
    told = [or_else(field) for field in right if chance.random() < 0.97]
    try:
        found = ipc_messages.read(type(right), or_else(tuple(told)))
    except MalformedMessageError:
        return "refused"
    for before, value in zip(right, found, strict=True):
        assert isinstance(value, tuple if isinstance(before, list) else type(before)), right
        assert not isinstance(value, int) or 0 <= value < 2**48
    return "accepted"


# -- shares, histories and counts


def fuzz_shares(chance: random.Random) -> str:
    """The scheduler's word on a worker's devices, and a worker's claim."""
    told = {"uuids": UUIDS[: chance.randint(0, 4)], "version": chance.randint(0, 9)}
    told = replaced(chance, told)
    try:
        uuids, version = read(Division, told if isinstance(told, dict) else {"uuids": told})
    except MalformedError:
        uuids = []
    else:
        assert version >= 0
        assert all(isinstance(uuid, str) for uuid in uuids)
    made, _ = scheduler()
    claim = {
        "address": chance.choice([OTHER, "tcp://10.0.0.3:1"]),
        "process": chance.choice(["a", "b"]),
        "candidates": UUIDS[: chance.randint(1, 4)],
    }
    claim = replaced(chance, claim)
    if not isinstance(claim, dict):
        claim = {"candidates": claim}
    answer = asyncio.run(made.handlers[CLAIM](**claim))
    if isinstance(answer, str):
        assert answer.startswith("refused: "), answer
        return "refused"
    mine, _ = read(Division, answer)
    assert all(isinstance(uuid, str) for uuid in mine)
    return "shared" if mine else "none left"


ROWS: dict[str, tuple[Any, ...]] = {
    "tasks": ("key", "prefix", UUIDS[0], 0, 1.0, 2.0, "memory", 0.0, 0.0, 0.0, 1, 0),
    "copies": (UUIDS[0], "host", 10, 1.0, 2.0, "spill", 1),
    "incidents": ("refused", 1.0, None, "key", "text", 1),
}


def fuzz_histories(chance: random.Random) -> str:
    """A worker's answer about its history; pages of the dashboard show all that is kept."""
    made, _ = scheduler()
    kept = DeviceHistory(made, list)
    known = kept._known(HEALTHY)
    answer = {
        "epoch": "1-1",
        "next": dict.fromkeys(KINDS, 3),
        "lost": dict.fromkeys(KINDS, 0),
        "rows": {name: [ROWS[name]] * chance.randint(0, 2) for name in ROWS} | {"samples": []},
        "devices": [(UUIDS[0], 0, "GPU"), (UUIDS[1], 1, None)],
    }
    try:
        kept._take(HEALTHY, known, replaced(chance, answer, 0.02))
    except MalformedError:
        assert known.since == {}
        return "refused"
    for _, row in kept.rows().rows:
        kind = next(name for name, of in KINDS.items() if isinstance(row, of))
        for name, right in zip(row.__slots__, ROWS[kind], strict=False):
            value = getattr(row, name)
            if name == "key":
                assert hash(value) == hash(value)
                continue
            same = isinstance(value, type(right)) or value is None or right is None
            assert same or isinstance(value, int | float), (row, value)
    return "kept"


def fuzz_questions(chance: random.Random) -> str:
    """The scheduler's question for a worker's history."""
    history = History(10)
    for number in range(3):
        history.happened("refused", text=str(number))
    since = replaced(chance, dict.fromkeys(KINDS, chance.randint(0, 4)), 0.2)
    epoch = chance.choice([history.answer()["epoch"], anything(chance)])
    answer = history.answer(epoch, since)
    return f"{len(answer['rows']['incidents'])} rows"


METRICS = {
    "devctx": [
        {
            "uuid": UUIDS[0], "device_id": 0, "name": "GPU", "done": 1, "failed": 0, "busy_s": 1.0,
            "occupied_s": 1.0, "slot_s": 0.0, "inputs_s": 0.0, "memory_s": 0.0, "out_of_memory": 0,
        }
    ],
    "devctx-traffic": [
        {"source": UUIDS[0], "destination": UUIDS[1], "nbytes": 1, "copies": 1, "saved": 0,
         "seconds": 0.1}
    ],
    "devctx-ipc": [
        {"source": UUIDS[0], "destination": UUIDS[1], "nbytes": 1, "copies": 1, "saved": 0,
         "seconds": 0.1, "transport": "ipc"}
    ],
}  # fmt: skip


def fuzz_counts(chance: random.Random) -> str:
    """The metrics of heartbeats, and the times and metadata of tasks, of a worker that leaves."""
    metrics = replaced(chance, METRICS)
    if not isinstance(metrics, dict):
        metrics = {"devctx": metrics}
    state = SimpleNamespace(metrics=metrics)
    counts = Counts(SimpleNamespace(workers={OTHER: state}))
    startstops = [{"action": "compute", "start": 1.0, "stop": 2.0}]
    if chance.random() < 0.5:
        startstops[0]["device"] = replaced(chance, UUIDS[0], 0.3)
    told = {
        "worker": OTHER,
        "startstops": startstops,
        "metadata": {"device": replaced(chance, UUIDS[0], 0.3)},
    }
    counts.ended(chance.choice(["memory", "erred"]), told)
    counts.left(OTHER)
    for uuid, past in counts.past.items():
        assert isinstance(uuid, str)
        assert past.counts.done >= 0 or metrics is not METRICS
    assert all(isinstance(part, str) for key in counts.transfers for part in key)
    return "counted" if counts.past and counts.transfers else "left out"
