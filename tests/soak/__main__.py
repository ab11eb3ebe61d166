"""The command ``python -m tests.soak``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import dask

from dask_devctx import devices
from tests.soak import __doc__ as about
from tests.soak import memory
from tests.soak.cluster import SETTINGS, Soak
from tests.soak.hosts import DEVICES, WORKERS


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after this time")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1000, metavar="TASKS")
    parser.add_argument("--under-way", type=int, default=4, metavar="BATCHES", help="at a time")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--loopback", action="store_true", help="no networks, even if root")
    parser.add_argument("--devices", type=int, help="of each host: 4, or with --gpus all GPUs")
    parser.add_argument("--gpus", action="store_true", help="one host, real GPUs, with CuPy")
    parser.add_argument("--faults", type=float, default=1.0, help="times the usual number")
    parser.add_argument("--guilty", type=float, default=0.1, help="such tasks in a batch")
    parser.add_argument("--patience", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="of progress")
    parser.add_argument("--logs", type=Path, help="a directory that keeps the programs' output")
    parser.add_argument("--steady", type=int, default=50_000, help="tasks without faults; 0: none")
    parser.add_argument("--steady-minutes", type=float, default=5.0, help="end these then")
    parser.add_argument("--growth", type=int, default=256, help="bytes a task beside dask's own")
    parser.add_argument("--trace", action="store_true", help="name the memory that stayed")
    parser.add_argument("--mode", choices=["faults", "calm", "plain"], default="faults")
    arguments = parser.parse_args(given)
    if arguments.seed is None:
        arguments.seed = random.randrange(2**16)
    if arguments.devices is None:
        arguments.devices = len(devices()) if arguments.gpus else DEVICES
    if arguments.devices % WORKERS or not arguments.devices:
        parser.error(
            f"each host has {WORKERS} workers, which take as many devices each; "
            f"got --devices {arguments.devices}"
        )
    if arguments.mode != "faults":
        print(json.dumps(memory.run(arguments)))
        return 0
    well, ended = soak(arguments) if arguments.tasks else (True, False)
    if arguments.steady and not ended:
        well = steady(arguments) and well
    print("every result right, nothing lost" if well else "not all is well: see above")
    return int(not well)


def soak(arguments: argparse.Namespace) -> tuple[bool, bool]:
    """Run tasks while things break, and print the table; return if all is well, if it was ended.

    A signal to end has no more tasks begin. A second one ends all at once.
    """
    # It warns of each result that is lost with a worker, and the scheduler makes them all again.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as temporary, dask.config.set(SETTINGS):
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
        run = Soak(arguments, arguments.logs or Path(temporary))

        def stop(number: int, _: Any) -> None:
            if run.ended:
                sys.exit(128 + number)
            run.ended = True
            print("interrupted: the tasks under way end; a second signal ends all", flush=True)

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        with run.cluster():
            try:
                run.run()
            except Exception:
                traceback.print_exc()
                run.outcomes["run", "failed"] += 1
            return run.table(run.settle()), run.ended


def steady(arguments: argparse.Namespace) -> bool:
    """Compare the growth of memory with dask's own; return whether it is small enough."""
    with tempfile.TemporaryDirectory() as locks:
        os.environ["DASK_DEVCTX__LOCK_DIRECTORY"] = locks
        given = ["--seed", str(arguments.seed), "--minutes", str(arguments.steady_minutes)]
        given += ["--batch", str(min(arguments.batch, 200))]
        given += ["--trace"] * arguments.trace
        if memory.compare(given, arguments.steady, arguments.growth):
            print("memory grew by more than dask's own")
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
