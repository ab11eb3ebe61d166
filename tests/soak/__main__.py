"""Many tasks of every kind while everything breaks; each result is checked.

Devices are simulated, or with ``--gpus`` real ones, where CuPy makes the values.

Run it with ``make soak``. A scheduler, and some hosts with several workers each, run batches of
tasks: small and large values that go between devices, workers and hosts, values beyond the limit of
device memory, tasks of several devices and of a part of one, coroutines, tasks without a device.

Meanwhile faults happen: workers and whole hosts are killed or stand still, devices break with and
without a guilty task, memory runs out, hosts lose their network, and the scheduler is restarted.
Only the tasks that broke a device may err. Everything else must give its right value. At the end
nothing may be left in device memory. Then tasks run without faults, and memory may hardly grow.

The hosts are network namespaces where this process is root. Elsewhere they are addresses of the
loopback device, whose network does not fail.

Tasks, faults and the moments of the faults follow from ``--seed``, but not the moment at which a
thread meets a fault. Most tasks are submitted with others of their shape, in one graph; some alone.
SIGINT and SIGTERM have no more tasks begin: the table comes when those under way have ended.
"""

from __future__ import annotations

import argparse
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
from tests.soak.cluster import SETTINGS, Soak, growth
from tests.soak.hosts import DEVICES, WORKERS


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after this time")
    parser.add_argument("--seed", type=int, default=random.randrange(2**16))
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
    parser.add_argument("--growth", type=int, default=1024, help="bytes a task, of each process")
    arguments = parser.parse_args(given)
    if arguments.devices is None:
        arguments.devices = len(devices()) if arguments.gpus else DEVICES
    if arguments.devices % WORKERS or not arguments.devices:
        parser.error(
            f"each host has {WORKERS} workers, which take as many devices each; "
            f"got --devices {arguments.devices}"
        )
    # It warns of each result that is lost with a worker, and the scheduler makes them all again.
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as temporary:
        well, ended = soak(arguments, Path(temporary)) if arguments.tasks else (True, False)
        if arguments.steady and not ended:
            os.environ["DASK_DEVCTX__LOCK_DIRECTORY"] = f"{temporary}/locks"
            for name, nbytes in growth(arguments).items():
                print(f"without faults, {name} grew by {nbytes:.0f} bytes a task")
                well = well and nbytes <= arguments.growth
    print("every result right, nothing lost" if well else "not all is well: see above")
    return int(not well)


def soak(arguments: argparse.Namespace, temporary: Path) -> tuple[bool, bool]:
    """Run tasks while things break, and print the table; return if all is well, if it was ended.

    A signal to end has no more tasks begin. A second one ends all at once.
    """
    with dask.config.set(SETTINGS):
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
        run = Soak(arguments, arguments.logs or temporary)

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
