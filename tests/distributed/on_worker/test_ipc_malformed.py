"""Malformed messages and headers between workers: refused and logged, and nobody ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
from distributed import Worker

from dask_devctx.worker.ipc.messages import AGREE, CLOSE, HELLO, NEXT
from tests.distributed import peers

FAR = 2**40


async def ask_each(messages: list[tuple[str, dict[str, Any]]], dask_worker: Worker) -> list[Any]:
    return [await dask_worker.handlers[op](**message) for op, message in messages]


def pid() -> int:
    return os.getpid()


def lie_about(name: str, value: Any, dask_worker: Worker) -> None:
    """Let a worker send headers with one wrong field."""
    outgoing = dask_worker.plugins["devctx"].extension.peers.way._outgoing
    right = type(outgoing)._message

    def wrong(*args: Any) -> Any:
        message = right(outgoing, *args)
        about = message["devctx-ipc"]
        if name == "offset":
            number, handle, _, nbytes = about["shown"]
            about["shown"] = (number, handle, value, nbytes)
        else:
            about[name] = value
        return message

    outgoing._message = wrong


def test_malformed_messages_are_refused_and_the_worker_goes_on() -> None:
    wrong = [
        (HELLO, {}),
        (HELLO, {"address": [], "process": "p", "host": "h"}),
        (AGREE, {"address": "a", "token": {}, "error": None}),
        (NEXT, {"token": "t", "number": [], "index": 0, "read": 0}),
        (NEXT, {"token": "t", "number": 1, "index": 0, "read": 1}),
        (CLOSE, {"token": "t", "numbers": 7}),
    ]
    refused = {"error": "it refused a malformed message"}
    with peers.cluster() as (client, workers):
        client.run(peers.keep_log)
        answers = client.run(ask_each, wrong, workers=workers[:1])[workers[0]]
        assert answers == [refused, refused, None, None, None, False]
        log = client.run(peers.kept_log)[workers[0]]
        assert sum("was refused" in line for line in log) == len(wrong)
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
