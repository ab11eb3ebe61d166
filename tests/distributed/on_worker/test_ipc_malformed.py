"""Malformed messages and headers between workers: refused and logged, and nobody ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
from distributed import Worker

from dask_devctx.transfer.ipc.messages import PROTOCOL
from dask_devctx.worker.peers import CLOSE
from dask_devctx.worker.peers.pairs import HELLO
from dask_devctx.worker.peers.receive import NEXT
from tests.distributed import peers

FAR = 2**40


async def ask_each(messages: list[tuple[str, Any]], dask_worker: Worker) -> list[Any]:
    return [await dask_worker.handlers[op](said=message) for op, message in messages]


def pid() -> int:
    return os.getpid()


def lie_about(name: str, value: Any, dask_worker: Worker) -> None:
    """Let a worker send headers with one wrong field."""
    sender = dask_worker.plugins["devctx"].extension.peers._sender
    right = type(sender)._message

    def wrong(*args: Any) -> Any:
        message = right(sender, *args)
        about = message["devctx-ipc"]
        if name == "offset":
            message["devctx-ipc"] = about._replace(place=about.place._replace(offset=value))
        else:
            message["devctx-ipc"] = about._replace(**{name: value})
        return message

    sender._message = wrong


def test_malformed_messages_are_refused_and_the_worker_goes_on() -> None:
    wrong = [
        (HELLO, ()),
        (HELLO, (PROTOCOL, [], "p", "h")),
        (HELLO, None),
        (NEXT, ("t", [], 0, 0)),
        (NEXT, ("t", -1, 0, 0)),
        (CLOSE, ("t", 7)),
    ]
    with peers.cluster() as (client, workers):
        client.run(peers.keep_log)
        answers = client.run(ask_each, wrong, workers=workers[:1])[workers[0]]
        assert answers == [None, None, None, None, None, False]
        log = client.run(peers.kept_log)[workers[0]]
        assert sum("was refused" in line for line in log) == len(wrong)
        old = (HELLO, (PROTOCOL - 1, "tcp://127.0.0.1:1", "p", "h"))
        (answer,) = client.run(ask_each, [old], workers=workers[:1])[workers[0]]
        assert answer == ("it has another version of dask-devctx", False)
        assert peers.nothing_staged(client)
        assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)


@pytest.mark.long
def test_a_value_with_a_malformed_header_comes_through_the_host() -> None:
    with peers.cluster(4) as (client, workers):
        before = client.run(pid)
        client.run(peers.keep_log)
        lies = [("offset", FAR), ("piece", 0), ("parts", "none")]
        for receiver, lie in zip(workers[1:], lies, strict=True):
            client.run(lie_about, *lie, workers=workers[:1])
            pair = [workers[0], receiver]
            for _ in range(2):
                assert peers.send(client, peers.array, peers.last, pair) == (1.0, True)
            log = client.run(peers.kept_log)[receiver]
            assert sum("The header of a transfer" in line for line in log) == 1, (lie, log)
        assert client.run(pid) == before
        assert peers.nothing_staged(client)
