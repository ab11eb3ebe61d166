"""Headers of transfers between workers, with the handles of another process's memory."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from distributed.comm import CommClosedError

from dask_devctx import Device, driver
from dask_devctx.dask_internals.connections import UNREAD
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DriverError
from dask_devctx.transfer.ipc.messages import Header, MalformedMessageError, read
from dask_devctx.transfer.ipc.parcel import _Place
from dask_devctx.transfer.ipc.ranges import Layout
from dask_devctx.transfer.ipc.receiving import Opened
from dask_devctx.worker.comms import device_types
from dask_devctx.worker.peers import receive
from dask_devctx.worker.peers.local import FAMILY, Local
from dask_devctx.worker.peers.receive import NEXT, Arriving, Receiver
from tests.fuzz.inputs import UUIDS, anything, replaced

HOST, NBYTES = "fuzz", 8192
# Another process, which exports memory until its input ends.
_EXPORT = """
import sys
from dask_devctx import Device, driver
from dask_devctx.dask_internals.connections import UNREAD
from dask_devctx.driver.simulated import SimulatedMachine
with driver.use(SimulatedMachine(2, host="fuzz").backend()), Device(0) as device:
    work = device._backend.calls.work
    print(work.ipc_export(work.allocate(int(sys.argv[1]))).hex(), flush=True)
    sys.stdin.read()
"""


class Sender:
    """The memory of another process, and a receiver of transfers from it."""

    handle = b"h" * 64

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.device = Device(1)
        self.answers: list[Any] = []
        self.failed = 0
        rpc = SimpleNamespace(**{NEXT: self._next})
        worker: Any = SimpleNamespace(address="tcp://10.0.0.1:1", rpc=lambda address: rpc)
        self._local = Local(
            worker,
            [Device(0), self.device],
            store=lambda: None,
            make_room=lambda device: 0,
            on_failure=self._on_failure,
            has_failed=lambda: False,
        )
        pairs: Any = SimpleNamespace(refuse=self._refuse, forget=lambda address: None)
        self._receiver = Receiver(self._local, pairs)

    def read(self, msg: dict[str, Any]) -> dict[str, Any]:
        """Read a message with values; raise as the receiver does."""
        self._loop.run_until_complete(self._receiver.complete("tcp://10.0.0.2:1", msg))
        return dict(msg["data"])

    def close(self) -> None:
        self._local.executor.shutdown()
        self._local.opened.close()
        self._loop.close()

    async def _next(self, **asked: Any) -> Any:
        return self.answers.pop() if self.answers else None

    async def _refuse(self, address: str, reason: str) -> None:
        assert isinstance(reason, str)

    def _on_failure(self, device: Device, error: DriverError) -> None:
        self.failed += 1


_senders: list[Sender] = []


@contextmanager
def sender() -> Iterator[None]:
    """While it is open, another process has memory that can be opened here."""
    logging.getLogger(receive.__name__).setLevel(logging.ERROR)
    assert device_types  # it knows how to allocate simulated memory
    process = subprocess.Popen(
        [sys.executable, "-c", _EXPORT, str(NBYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    machine = SimulatedMachine(2, host=HOST, total_memory=2**30)
    try:
        with driver.use(machine.backend()):
            made = Sender()
            made.handle = bytes.fromhex(process.stdout.readline())
            _senders.append(made)
            yield
            made.close()
            gc.collect()
            left = [gpu.used_memory for gpu in machine.gpus]
            assert not sum(left), f"{left} bytes were not given back"
    finally:
        _senders.clear()
        process.stdin.close()
        process.wait()


@functools.cache
def _pickled() -> bytes:
    return pickle.dumps([_Place(0)], protocol=5)


def fuzz_arrivals(chance: random.Random) -> str:
    """Let a receiver read values by strange headers, handles and answers."""
    (to,) = _senders
    sizes = [chance.choice([0, 1, 300, 4096]) for _ in range(chance.randint(1, 3))]
    total = Layout(sizes).nbytes
    piece = chance.choice([max(total, 1), 1024])
    shown = [
        chance.choice([1, 1, 1, 2]),
        to.handle if chance.random() < 0.9 else chance.randbytes(64),
        chance.choice([0, 0, 512, NBYTES - 1, 2**40]),
        total,
    ]
    source = chance.choice([to.device.uuid, UUIDS[0]])
    parts = [["simulated", nbytes, None] for nbytes in sizes]
    about = ["ipc:memory", 1, source, piece, parts, shown]
    value = {"first": 0, "count": len(sizes), "writeable": []}
    frames = [_pickled() if chance.random() < 0.9 else chance.randbytes(8)]
    to.answers = [replaced(chance, shown) for _ in range(8)]
    try:
        given = replaced(chance, value, 0.02)
        arriving = Arriving(given, frames)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return "not unpacked"  # distributed fails its key
    msg = {"data": {"key": arriving, "host": 1}, FAMILY: replaced(chance, about, 0.02)}
    unread: dict[Any, Exception] = {}
    token = UNREAD.set(unread)
    try:
        data = to.read(msg)
    except CommClosedError:
        return "refused"
    finally:
        UNREAD.reset(token)
    assert not to.failed
    assert unread.keys() | data.keys() == {"key", "host"}
    if unread:
        return "unreadable"
    assert not isinstance(data["key"], Arriving)
    return "read"


def fuzz_headers(chance: random.Random) -> str:
    """Give a receiver the header of a transfer with some parts replaced."""

    def or_else(value: Any) -> Any:
        return value if chance.random() < 0.95 else anything(chance)

    sizes = [chance.choice([0, 1, 255, 300, 4096]) for _ in range(chance.randint(0, 3))]
    total = Layout(sizes).nbytes
    shown = [1, or_else(b"h" * 64), or_else(chance.choice([0, 0, 512, 2**40])), or_else(total)]
    parts = or_else([or_else([or_else("simulated"), or_else(n), None]) for n in sizes])
    piece = or_else(chance.choice([max(total, 1), 1024]))
    fields = ["ipc:memory", 1, UUIDS[0]]
    given = [or_else(field) for field in fields] + [piece, parts, [or_else(one) for one in shown]]
    given = [value for value in given if chance.random() < 0.99]
    try:
        header = read(Header, or_else(given))
    except MalformedMessageError:
        return "refused"
    layout = Layout(part.nbytes for part in header.parts)
    assert layout.nbytes < 2**70
    anywhere: Any = None
    opened = Opened(anywhere, 4096, 8192)
    try:
        place = opened.address(header.place, min(header.piece, layout.nbytes))
    except MalformedMessageError:
        return "outside"
    assert place >= 4096
    assert place + min(header.piece, layout.nbytes) <= 4096 + 8192
    return "accepted"
