"""``dask devctx top``: the devices of a cluster in a terminal, live."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import click
from distributed import Client

from dask_devctx.cli.connection import connected, finds_scheduler
from dask_devctx.client.live import LiveDevice, Moment, between, moment, rates
from dask_devctx.client.tables import device_names, shortened
from dask_devctx.errors.base import nbytes_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_BAR: Final = 8
# The columns that the table needs, if values were moved to the host, and if none was. A narrower
# terminal sees a shorter one. A pipe has no width.
_COLUMNS: Final = 146
_WITHOUT_SPILLS: Final = 112
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
@finds_scheduler
def top(scheduler: str | None, once: bool, as_json: bool, interval: float, **where: Any) -> None:
    """Show the tasks, memory and transfers of a cluster's devices; Ctrl-C ends it.

    The exit status is 1 if the scheduler cannot be reached, or goes away.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once")
    with connected(scheduler, **where) as client:
        if not as_json:
            _require_rich()
        try:
            if once:
                _print_once(client, as_json, max(interval, _HEARTBEAT_S))
            else:
                with suppress(KeyboardInterrupt), _interrupted() as interrupted:
                    _show_live(client, interval, interrupted)
        except (OSError, TimeoutError) as error:
            raise click.ClickException(f"the scheduler went away: {error}") from error


def _require_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError:
        remedy = "pip install rich"
        raise click.ClickException(f"this needs the package rich: {remedy}") from None


def _print_once(client: Client, as_json: bool, interval: float) -> None:
    before = moment(client)
    time.sleep(interval)
    now = moment(client, before)
    if as_json:
        click.echo(json.dumps(_as_data(before, now), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    Console(width=max(console.width, _COLUMNS), highlight=False).print(_view(client, before, now))


def _show_live(client: Client, interval: float, interrupted: Event) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _COLUMNS))

    def view(before: Moment, now: Moment) -> Group:
        return _view(client, before, now, console.width)

    before = moment(client)
    with Live(view(before, before), console=console, auto_refresh=False, screen=False) as live:
        while not interrupted.wait(interval):
            now = moment(client, before)
            live.update(view(before, now), refresh=True)
            before = now


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
    devices = [asdict(device) for device in between(before, now)]
    return {"workers": dict(now.workers), "devices": devices, "transfers": transfers}


# -- for people


def _view(client: Client, before: Moment, now: Moment, columns: int = _COLUMNS) -> Group:
    from rich.console import Group
    from rich.text import Text

    devices = between(before, now)
    total = sum(device.tasks_per_s for device in devices)
    workers = f"{len(now.workers)} worker{'' if len(now.workers) == 1 else 's'}"
    head = f"{client.scheduler.address}: {len(devices)} devices of {workers}, {total:.0f} tasks/s"
    parts: list[Any] = [Text(head, style="bold"), _table(devices, columns)]
    ways: Counter[str] = Counter()
    for (_, _, way), rate in rates(before, now).items():
        ways[way] += round(rate)
    if any(ways.values()):
        parts.append(
            Text("moving: " + ", ".join(f"{nbytes_text(n)}/s by {w}" for w, n in ways.items() if n))
        )
    bare = len(now.workers) - len({worker for worker, _ in now.devices})
    if bare:
        parts.append(Text(f"{bare} of the workers have no device", style="yellow"))
    return Group(*parts)


def _table(devices: list[LiveDevice], columns: int) -> Table:
    """Return the table; a narrow one has the device's memory as a share, and no workers."""
    from rich.table import Table
    from rich.text import Text

    spilled = any(device.memory.get("spilled") for device in devices)
    narrow = columns < (_COLUMNS if spilled else _WITHOUT_SPILLS)
    spilled = spilled and not narrow
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    shown = device_names((device.host, device.device_id, device.uuid) for device in devices)
    table.add_column("device", no_wrap=True, min_width=max(map(len, shown.values()), default=0))
    if not narrow:
        table.add_column("worker", no_wrap=True)
    for name in ("GPU", "busy", "tasks/s", "runs", "waits", "done", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("memory", no_wrap=True)
    table.add_column("copied in", justify="right", no_wrap=True)
    for name in ("kept of limit", "on the host") if spilled else ():
        table.add_column(name, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(
            shown[device.uuid],
            *(() if narrow else (shortened(", ".join(device.workers), 16),)),
            _percent(device.utilization),
            _percent(device.occupied),
            f"{device.tasks_per_s:.0f}",
            str(device.running),
            str(device.queued),
            str(device.done),
            Text(str(device.failed), style="red" if device.failed else ""),
            _memory(device, narrow=narrow),
            f"{nbytes_text(round(device.nbytes_per_s))}/s",
            *(_spilled(device) if spilled else ()),
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _memory(device: LiveDevice, *, narrow: bool) -> str:
    total = device.memory.get("total")
    if not total:
        return "?"
    used = total - device.memory["free"]
    if narrow:
        return f"{used / total:.0%} of {nbytes_text(total)}"
    filled = round(_BAR * used / total)
    bar = f"{'█' * filled}{'░' * (_BAR - filled)}"
    return f"{bar} {nbytes_text(used)} of {nbytes_text(total)}"


def _spilled(device: LiveDevice) -> tuple[str, str]:
    """Return the bytes of values that dask keeps there and their limit, and those on the host."""
    kept = device.memory.get("held", 0) + device.memory.get("copies", 0)
    limit = device.memory.get("limit")
    of = "" if limit is None else f" of {nbytes_text(limit)}"
    return f"{nbytes_text(kept)}{of}", nbytes_text(device.memory.get("spilled", 0))
