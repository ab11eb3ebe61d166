"""``dask devctx top``: the devices of a cluster in a terminal, live."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from threading import Event
from typing import Any, Final

import click

from dask_devctx.cli.connection import connected, finds_scheduler
from dask_devctx.client.live import Moment, aligned, between, moment, rates, rows
from dask_devctx.errors import counted, nbytes_text
from dask_devctx.scheduler.rows import OF_A_DEVICE, OF_A_WORKER, memory_field

_COLUMNS: Final = (
    *("worker", "use", "busy", "tasks/s", "runs", "waits", "done", "failed"),
    *("memory used", "copied in/s", "now"),
)
_SPILLED: Final = ("kept of limit", "on the host")
# A narrow terminal sees a table without these.
_SPARE: Final = (*_SPILLED, "worker", "copied in/s", "waits", "now")
_SORTED_BY: Final = {
    "use": "utilization",
    "busy": "occupied",
    "tasks": "tasks_per_s",
    "waits": "queued",
    "memory": "used",
    "spilled": "memory_spilled",
}
# The scheduler has news of a worker each half a second.
_HEARTBEAT_S: Final = 1.0


@click.command(
    "top",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  dask devctx top tcp://scheduler:8786
  dask devctx top tcp://scheduler:8786 --once --json
""",
)
@click.argument("scheduler", required=False)
@click.option("--once", is_flag=True, help="Print the state once, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON.")
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
@finds_scheduler
def top(
    scheduler: str | None,
    once: bool,
    as_json: bool,
    interval: float,
    sort: str | None,
    **where: Any,
) -> None:
    """Show the tasks, memory and transfers of a cluster's devices; Ctrl-C ends it.

    The exit status is 1 if the scheduler cannot be reached, or goes away.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    with connected(scheduler, **where) as client:
        try:
            with suppress(KeyboardInterrupt), _interrupted() as interrupted:
                before = moment(client)
                while not interrupted.wait(max(interval, _HEARTBEAT_S) if once else interval):
                    now = moment(client)
                    if as_json:
                        click.echo(json.dumps(_as_data(before, now), indent=2))
                    else:
                        if not once:
                            click.clear()
                        click.echo(_as_text(str(client.scheduler.address), before, now, sort))
                    if once:
                        return
                    before = now
        except (OSError, TimeoutError) as error:
            raise click.ClickException(f"the scheduler went away: {error}") from error


@contextmanager
def _interrupted() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets; a second one raises KeyboardInterrupt."""
    # An exception that a signal raises can be lost: in a callback, or in an object's `__del__`.
    interrupted = Event()

    def on_interrupt(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    earlier = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, earlier)


def _as_data(before: Moment, now: Moment) -> dict[str, Any]:
    transfers = [
        {
            **dict(zip(("source", "destination", "transport"), ends, strict=True)),
            "nbytes": now.transfers[ends],
            "nbytes_per_s": rate,
        }
        for ends, rate in rates(before, now).items()
    ]
    kinds = (*OF_A_DEVICE, *OF_A_WORKER)
    devices = [
        asdict(one) | {"memory": {kind: getattr(one, memory_field(kind)) for kind in kinds}}
        for one in between(before, now)
    ]
    return {"workers": dict(now.workers), "devices": devices, "transfers": transfers}


def _as_text(address: str, before: Moment, now: Moment, sort: str | None) -> str:
    devices = between(before, now)
    if sort is not None:
        devices.sort(key=lambda one: getattr(one, _SORTED_BY[sort]) or 0, reverse=True)
    speed = sum(device.tasks_per_s for device in devices)
    workers = counted(len(now.workers), "worker")
    spilled = any(device.memory_spilled for device in devices)
    columns = [*_COLUMNS, *(_SPILLED if spilled else ())]
    # A pipe has no width.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 999
    spare = iter(_SPARE)
    while True:
        table = aligned(("device", *columns), rows(devices, columns))
        narrower = next(spare, None)
        if max(map(len, table.splitlines())) <= width or narrower is None:
            break
        columns = [name for name in columns if name != narrower]
    lines = [f"{address}: {len(devices)} devices of {workers}, {speed:.0f} tasks/s", table]
    moving: Counter[str] = Counter()
    for (_, _, transport), rate in rates(before, now).items():
        moving[transport] += round(rate)
    if moving.total():
        told = (f"{nbytes_text(n)}/s by {transport}" for transport, n in moving.items() if n)
        lines.append(f"moving: {', '.join(told)}")
    used = {name for device in devices for name in device.workers}
    if bare := len({*now.workers.values()} - used):
        lines.append(f"{bare} of the workers have no device")
    return "\n".join(lines)
