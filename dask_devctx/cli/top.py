"""``dask devctx top``: the devices of a cluster in a terminal, live."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Final

import click
from distributed import Client

from dask_devctx.cli.connection import scheduler_address
from dask_devctx.client.live import LiveDevice, Moment, aligned, between, cells, moment
from dask_devctx.errors import counted, nbytes_text

# The last ones are cut off in a narrow terminal.
_COLUMNS: Final = (
    *("use", "busy", "tasks/s", "runs", "waits", "failed", "memory used", "spilled", "now"),
    *("done", "kept", "copied in/s", "worker"),
)
_SORTED_BY: Final[Mapping[str, Callable[[LiveDevice], float]]] = {
    "use": lambda device: device.utilization or 0,
    "busy": lambda device: device.occupied or 0,
    "tasks": attrgetter("tasks_per_s"),
    "waits": attrgetter("queued"),
    "memory": lambda device: (device.memory_total or 0) - (device.memory_free or 0),
    "spilled": lambda device: device.memory_spilled or 0,
}
# The scheduler has news of a worker each half a second.
_HEARTBEAT_S: Final = 1.0


@click.command(
    "top",
    epilog="""\b
Examples:
  dask devctx top tcp://scheduler:8786
  dask devctx top tcp://scheduler:8786 --once --sort memory
""",
)
@click.argument("scheduler", required=False)
@click.option("--once", is_flag=True, help="Print the state once, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two states.",
)
@click.option(
    "--sort", type=click.Choice([*_SORTED_BY]), help="The largest first; by device by default."
)
@click.option("--scheduler-file", type=click.Path(exists=True), help="As of dask scheduler.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    help="Seconds to wait for the scheduler.",
)
def top(
    scheduler: str | None,
    once: bool,
    interval: float,
    sort: str | None,
    scheduler_file: str | None,
    timeout: float,
) -> None:
    """Show the tasks, memory and transfers of a cluster's devices; Ctrl-C ends it.

    The exit status is 1 if the scheduler cannot be reached, or goes away.
    """
    address = scheduler_address(scheduler, scheduler_file)
    where = {"scheduler_file": scheduler_file} if scheduler_file else {"address": address}
    try:
        connected = Client(timeout=timeout, set_as_default=False, **where)
    except (OSError, TimeoutError, ValueError) as why:
        raise click.ClickException(f"no scheduler at {scheduler_file or address}: {why}") from why
    with connected as client:
        try:
            with suppress(KeyboardInterrupt):
                before = moment(client)
                time.sleep(max(interval, _HEARTBEAT_S) if once else min(interval, _HEARTBEAT_S))
                while True:
                    now = moment(client)
                    if not once:
                        click.clear()
                    click.echo(_as_text(str(client.scheduler.address), before, now, sort))
                    if once:
                        return
                    before = now
                    time.sleep(interval)
        except (OSError, TimeoutError) as error:
            raise click.ClickException(f"the scheduler went away: {error}") from error


def _as_text(address: str, before: Moment, now: Moment, sort: str | None) -> str:
    devices = between(before, now)
    if sort is not None:
        devices.sort(key=_SORTED_BY[sort], reverse=True)
    speed = sum(device.tasks_per_s for device in devices)
    workers = counted(len(now.workers), "worker")
    # A pipe has no width.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    table = aligned(("device", *_COLUMNS), cells(devices, _COLUMNS)).splitlines()
    lines = [f"{address}: {counted(len(devices), 'device')} of {workers}, {speed:.0f} tasks/s"]
    lines += [line[:width] for line in table]
    elapsed_s = now.at - before.at
    rates = {way: (n - before.moved.get(way, 0)) / elapsed_s for way, n in now.moved.items()}
    if told := [f"{nbytes_text(round(n))}/s by {way}" for way, n in rates.items() if n >= 1]:
        lines.append(f"moving: {', '.join(told)}")
    used = {name for device in devices for name in device.workers}
    if bare := len({*now.workers.values()} - used):
        lines.append(f"without devices in their last heartbeat: {counted(bare, 'worker')}")
    return "\n".join(lines)
