"""``dask devctx worker``: workers for the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click
import dask
from distributed.cli.dask_worker import main as dask_worker

from dask_devctx.cli.connection import said, scheduler_address
from dask_devctx.client.layout import lay_out
from dask_devctx.config.checks import RMM, flag, key_of, settings
from dask_devctx.config.options import (
    OPTION_NAMES,
    RMM_NAMES,
    Options,
    fold_rmm,
    instead_of,
    require_packages,
    require_ucx,
    text_of,
)

_HELP = """Start workers on this machine, which use its GPUs.

The workers join the scheduler at SCHEDULER, or that of --scheduler-file. By default there is a
worker for each GPU that no other cluster of yours holds, with a nanny that starts it again. The
number of threads follows from the GPUs.
Each option of a device has a key in dask's configuration, too, such as devctx.tasks-per-device.
Arguments after -- go to the modules of --preload.

The exit status is 0 after Ctrl-C or SIGTERM, 1 if a worker cannot start, and 2 for wrong options.
"""
_EXAMPLES = """\b
Examples:
  dask devctx worker tcp://scheduler:8786
  dask devctx worker --scheduler-file scheduler.json --devices 0,1
  dask devctx worker tcp://scheduler:8786 --n-workers 1
  dask devctx worker tcp://scheduler:8786 --tasks-per-device 2 --memory-limit 64GiB
  dask devctx worker tcp://scheduler:8786 --rmm-pool-size 0.8 \\
      --rmm-allocator-external-lib-list cupy,torch
"""

# dask's options that have another meaning or default here.
_OURS_TOO: Final = {"n_workers", "nthreads"}
# An option that is a function has no text.
_IN_PYTHON_ONLY: Final = {"policy"}
# The help shows these options first.
_EVERYDAY: Final = (
    *("devices", "devices_per_worker", "n_workers", "nthreads", "tasks_per_device"),
    *("device_memory_limit", "memory_limit", "scheduler_file", "protocol", "interface"),
    *("name", "local_directory"),
)


def option_names() -> list[str]:
    """Return the names of the plugin's options that the command has."""
    return [name for name in (*OPTION_NAMES, *RMM_NAMES) if name not in _IN_PYTHON_ONLY]


def _run(**given: Any) -> None:
    """Start the workers, as the command's options say, and wait for their end."""
    own = {name: given.pop(name) for name in option_names()}
    n_workers = given.pop("n_workers")
    address = scheduler_address(given["scheduler"], given["scheduler_file"])
    if address is None and not Path(given["scheduler_file"]).exists():
        file = given["scheduler_file"]
        click.echo(f"Waiting for {file}, which dask scheduler --scheduler-file writes", err=True)
    with said():
        require_ucx(given["protocol"])
        read = _read(own)
        with dask.config.set(settings(read)):
            options = Options(**read)
            require_packages(options)
            layout = lay_out(options, n_workers, processes=given["nanny"])
    given["nthreads"] = given["nthreads"] or layout.nthreads
    if given["memory_limit"] == "auto":
        given["memory_limit"] = layout.memory_limit
    given["preload"] = ("dask_devctx", *given["preload"])
    assert dask_worker.callback is not None
    with dask.config.set(settings({**read, **layout.options})), said():
        dask_worker.callback(**given, n_workers=str(layout.n_workers))


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given, with values as in dask's variables."""
    found = fold_rmm({name: value for name, value in given.items() if value is not None})
    for name, value in found.items():
        if name == "devices":
            found[name] = [dask.config.interpret_value(one.strip()) for one in value.split(",")]
        elif isinstance(value, str):
            found[name] = dask.config.interpret_value(value)
        elif isinstance(value, dict):  # RMM's settings
            texts = {n: v for n, v in value.items() if isinstance(v, str)}
            found[name] = value | {n: dask.config.interpret_value(v) for n, v in texts.items()}
    return found


# -- the command's options


class _Command(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if remedy := instead_of(error.option_name.strip("-").replace("-", "_")):
                text = f"No such option: {error.option_name}. {remedy}"
                raise click.UsageError(text, ctx) from error
            raise


def _parameters() -> Iterator[click.Parameter]:
    for param in dask_worker.params:
        if isinstance(param, click.Argument):
            yield param
    flags = {one.name for one in fields(Options) if one.metadata["check"] is flag}
    flags |= {f"rmm_{name}" for name, check in RMM.items() if check is flag}
    for name in option_names():
        key = key_of(name)
        spelling = f"--{key}/--no-{key}" if name in flags else f"--{key}"
        metavar = None if name in flags else "VALUE"
        said = text_of(name) + (" With commas between them." if name == "devices" else "")
        yield click.Option([spelling, name], default=None, metavar=metavar, help=said)
    yield click.Option(
        ["--n-workers", "--nworkers", "n_workers"],
        type=click.IntRange(1),
        help="The number of workers; the devices are divided evenly among them. By default there "
        "is one for each device, or a single one where processes cannot share memory of devices.",
    )
    yield click.Option(
        ["--nthreads"],
        type=click.IntRange(1),
        help="How many tasks dask gives a worker at a time. By default 8 for each task that its "
        "devices run at a time.",
    )
    for param in dask_worker.params:
        if isinstance(param, click.Option) and param.name not in _OURS_TOO:
            yield param


_ORDER: Final = {name: n for n, name in enumerate(_EVERYDAY)}
worker = _Command(
    "worker",
    callback=_run,
    params=sorted(_parameters(), key=lambda one: _ORDER.get(str(one.name), len(_ORDER))),
    help=_HELP,
    epilog=_EXAMPLES,
)
