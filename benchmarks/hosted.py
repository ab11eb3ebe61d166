"""The other end of :class:`benchmarks.host.Host`: ``python -m benchmarks.hosted FD FACTORY``.

The workers that a cluster spawns import this module again, so it imports very little.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    module, _, name = sys.argv[2].partition(":")
    args = pipe.recv()
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(getattr(importlib.import_module(module), name)(*args))
        except Exception as error:
            pipe.send((False, _said(error)))
            return
        gc.collect()
        gc.freeze()  # collections skip the objects of imported libraries
        pipe.send((True, None))
        while (request := _request(pipe)) is not None:
            method, given = request
            try:
                answer = True, getattr(held, method)(*given)
            except Exception as error:
                answer = False, _said(error)
            pipe.send(answer)


def _request(pipe: Connection[Any, Any]) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the other end is gone
        return None


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    return text if len(text) < 400 else f"{text[:200]} … {text[-190:]}"


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads that a library left running
