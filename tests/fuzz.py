"""Gives millions of strange inputs; only documented answers and errors may come back.

Run as ``make fuzz``. Pieces of right input, numbers at their limits, other scripts' digits, white
space and plain noise are combined at random. They are given to the readers of
``CUDA_VISIBLE_DEVICES``, of the ``device`` annotation, of the configuration, of workers' messages
to the scheduler and to each other, and of the headers of transfers between workers.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import dask
from distributed.core import coerce_to_address

from dask_devctx import DevicePlugin
from dask_devctx.annotations import requested_device
from dask_devctx.annotations.runs import watched_run
from dask_devctx.cuda.discovery import DeviceInfo, Inventory
from dask_devctx.cuda.naming import find
from dask_devctx.driver import settings
from dask_devctx.driver.visible import PhysicalDevice, visible_devices
from dask_devctx.errors import DeviceNotFoundError, DriverUnavailableError
from dask_devctx.scheduler import routing, suspects
from dask_devctx.scheduler.announcements import ANNOUNCE, REFUSE, WITHDRAW
from dask_devctx.scheduler.routing import DeviceRouting
from dask_devctx.transfer.ipc.headers import MalformedHeaderError, read_header
from dask_devctx.transfer.ipc.layout import Layout
from dask_devctx.transfer.ipc.opened import Opened
from dask_devctx.worker.ipc import messages

MIG = tuple(f"MIG-00000000-0000-0000-0000-00000000000{n}" for n in range(2))
UUIDS = [f"GPU-b33ebc8{n}-95a3-9648-c914-5259efe7a11e" for n in range(4)]
MACHINES = [
    [],
    [PhysicalDevice(uuid) for uuid in UUIDS],
    [PhysicalDevice(uuid, MIG if n == 2 else (), n == 2) for n, uuid in enumerate(UUIDS)],
    [PhysicalDevice(UUIDS[0], MIG, True)],
]
INVENTORY = Inventory(
    tuple(
        DeviceInfo(n, uuid, f"GPU {n}", f"0000:{n:02x}:00.0") for n, uuid in enumerate(UUIDS[:3])
    ),
    (DeviceInfo(-1, UUIDS[3]),),
)

PIECES = [
    *UUIDS, *MIG, "GPU-", "MIG-", "gpu-", "GPU-b33ebc80", "b33ebc80", "cuda", "cuda:", "gpu:",
    "auto", "none", "0000:01:00.0", "00000000:01:00.0", "01:00.0", "NoDevFiles", "0", "1", "3", "4",
    "-1",
    "-0", "+1", "01", "0x1", "1.5", "1e3", "2147483648", "4294967296", "9223372036854775807",
    "9" * 40, ",", ",,", ", ", ";", ":", "-", " ", "\t", "\n", "\0", "\x0b", "", "all", "void", "٣",
    "²", "é", "\U0001f600", "\udc80", "None", "True", "nan", "inf", "[0]", "{}", "%s", "../",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 0.5, float("nan"), float("inf"), 10**30, b"0", (), [0],
    {"a": 1}, {1}, object(), type, int, lambda key: 1, 1j, Ellipsis, NotImplemented, range(2),
]  # fmt: skip


def text(chance: random.Random) -> str:
    parts = [chance.choice(PIECES) for _ in range(chance.randint(0, 5))]
    value = chance.choice(["", ",", ", ", ":"]).join(parts)
    for _ in range(chance.choice([0, 0, 1, 3])):  # and noise
        place = chance.randint(0, len(value))
        value = (
            value[:place] + chr(chance.randint(0, 0x24F)) + value[place + chance.randint(0, 1) :]
        )
    return value


def anything(chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.6:
        return text(chance)
    if kind < 0.8:
        return chance.randint(-(2 ** chance.randint(1, 70)), 2 ** chance.randint(1, 70))
    return chance.choice(VALUES)


def fuzz_visible_devices(chance: random.Random) -> str:
    machine = chance.choice(MACHINES)
    value = text(chance)
    seen = visible_devices(value, machine)  # never raises
    known = {device.uuid for device in machine if not device.mig_enabled}
    known |= {mig for device in machine for mig in device.mig}
    assert set(seen.uuids) <= known, value
    assert len(set(seen.uuids)) == len(seen.uuids), value
    assert (seen.stopped_at is None) == (not seen.reason), value
    assert seen.stopped_at is None or seen.stopped_at in value, value
    return "shown" if seen.uuids else "hidden"


def fuzz_device_names(chance: random.Random) -> str:
    value = anything(chance)
    try:
        found = find(value, INVENTORY)
    except DeviceNotFoundError as error:
        return "not found" if str(error) else "without words"
    except TypeError:
        return "no name"
    assert found is None or found in INVENTORY.devices, value
    return "current" if found is None else "found"


def fuzz_annotations(chance: random.Random) -> str:
    value = anything(chance)
    wanted = requested_device(
        chance.choice([{"device": value}, {"device": value, "x": 1}, {}, None]),
        "key",
        chance.choice(["assign", "leave"]),
    )
    if wanted is None:
        return "none"
    try:
        find(wanted, INVENTORY)
    except (DeviceNotFoundError, TypeError):
        return "refused"
    return "a device"


def fuzz_configuration(chance: random.Random) -> str:
    settings = {
        f"devctx.{key}": anything(chance)
        for key in (
            "tasks-per-device",
            "devices-per-worker",
            "unannotated",
            "move-inputs",
            "replica-limit",
            "synchronize",
            "oom-retries",
        )
        if chance.random() < 0.4
    }
    with dask.config.set(settings):
        try:
            options = DevicePlugin().options
        except ValueError as error:
            right = "must be" in str(error) or "is a fraction" in str(error)
            return "refused" if right else "refused in other words"
    assert options.tasks_per_device >= 1
    assert options.oom_retries >= 0
    assert options.devices_per_worker is None or options.devices_per_worker >= 1
    assert 0 <= options.replica_limit <= 1
    return "accepted"


def fuzz_simulated_devices(chance: random.Random) -> str:
    with dask.config.set({"devctx.simulated-devices": anything(chance)}):
        try:
            count = settings.simulated_devices()
        except DriverUnavailableError:
            return "refused"
    assert isinstance(count, int)
    assert count >= 0
    return "accepted"


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
    logging.getLogger(messages.__name__).setLevel(logging.ERROR)
    made: Any = Anything()
    made.workers = {
        address: SimpleNamespace(name=address, host="h", has_what=())
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
        "kind": or_else(chance.choice(["DevicesInUseError", "LockDirectoryError"])),
        "arguments": or_else(chance.choice([[1, ["cuda:0"], {}], ["/tmp", "is none"], [2]])),
        chance.choice(["more", text(chance)]): anything(chance),
    }
    return {name: value for name, value in whole.items() if chance.random() < 0.95}


def fuzz_messages_to_the_scheduler(chance: random.Random) -> str:
    made, plugin = scheduler()
    op = chance.choice([ANNOUNCE, ANNOUNCE, WITHDRAW, REFUSE])
    answer = made.handlers[op](**message(chance))
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
    ts = SimpleNamespace(key="key", annotations=None, who_has=set())
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


def fuzz_headers(chance: random.Random) -> str:
    """Give a receiver the header of a transfer with some parts replaced."""

    def or_else(value: Any) -> Any:
        return value if chance.random() < 0.95 else anything(chance)

    sizes = [chance.choice([0, 1, 255, 300, 4096]) for _ in range(chance.randint(0, 3))]
    total = Layout(sizes).nbytes
    shown = [1, or_else(b"h" * 64), or_else(chance.choice([0, 0, 512, 2**40])), or_else(total)]
    given = {
        "sender": or_else("token"),
        "number": or_else(1),
        "source": or_else(UUIDS[0]),
        "piece": or_else(chance.choice([max(total, 1), 1024])),
        "parts": or_else([or_else([or_else("simulated"), or_else(n), None]) for n in sizes]),
        "shown": or_else([or_else(field) for field in shown]),
    }
    given = {name: value for name, value in given.items() if chance.random() < 0.98}
    try:
        header = read_header(or_else(given))
    except MalformedHeaderError:
        return "refused"
    assert header.piece >= 1
    layout = Layout(nbytes for _, nbytes, _ in header.parts)
    assert layout.nbytes < 2**49
    anywhere: Any = None
    opened = Opened(anywhere, 4096, 8192)
    try:
        place = opened.place(header.shown.offset, min(header.piece, layout.nbytes))
    except MalformedHeaderError:
        return "outside"
    assert place >= 4096
    assert place + min(header.piece, layout.nbytes) <= 4096 + 8192
    return "accepted"


def fuzz_messages_between_workers(chance: random.Random) -> str:
    def or_else(value: Any, likely: float = 0.9) -> Any:
        return value if chance.random() < likely else anything(chance)

    op = chance.choice([messages.HELLO, messages.AGREE, messages.NEXT, messages.CLOSE])
    told = {
        "address": or_else(OTHER),
        "process": or_else("process"),
        "host": or_else("host"),
        "token": or_else("token"),
        "error": or_else(None),
        "number": or_else(1),
        "index": or_else(chance.randint(0, 3)),
        "read": or_else(chance.randint(0, 3)),
        "numbers": or_else([or_else(n) for n in range(chance.randint(0, 3))]),
        chance.choice(["more", text(chance)]): anything(chance),
    }
    acted: list[dict[str, Any]] = []

    async def act(**fields: Any) -> str:
        acted.append(fields)
        return "done"

    handle = messages.handler(op, act)
    call = handle(**{name: value for name, value in told.items() if chance.random() < 0.97})
    try:
        call.send(None)
    except StopIteration as end:
        answer = end.value
    if not acted:
        assert answer in (None, False, {"error": "it refused a malformed message"}), answer
        return "refused"
    (fields,) = acted
    for name, value in fields.items():
        kinds = {"number": int, "index": int, "read": int, "numbers": list}
        assert isinstance(value, kinds.get(name, str)) or name == "error", (name, value)
    assert fields.get("read", 0) <= fields.get("index", 0)
    return "accepted"


TARGETS: list[Callable[[random.Random], str]] = [
    fuzz_visible_devices,
    fuzz_visible_devices,
    fuzz_device_names,
    fuzz_device_names,
    fuzz_annotations,
    fuzz_configuration,
    fuzz_simulated_devices,
    fuzz_messages_to_the_scheduler,
    fuzz_failures,
    fuzz_headers,
    fuzz_messages_between_workers,
]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args(given)
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(arguments.inputs):
        target = TARGETS[number % len(TARGETS)]
        try:
            outcomes[f"{target.__name__}: {target(chance)}"] += 1
        except BaseException:
            print(f"input {number} of seed {seed} in {target.__name__}", file=sys.stderr)
            raise
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:9d}  {outcome}")
    print(f"{arguments.inputs} inputs of seed {seed} in {time.monotonic() - started:.1f} s")
    return int(any("words" in outcome for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
