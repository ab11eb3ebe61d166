"""``--preload dask_devctx``, for workers and for the scheduler."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from traceback import walk_tb
from types import FrameType, TracebackType

import click
import dask
from distributed import Scheduler, Worker, WorkerPlugin

from dask_devctx.cli.connection import said, usable_options
from dask_devctx.dask_internals.worker import set_up_at_start
from dask_devctx.plugin import DevicePlugin
from dask_devctx.scheduler.routing import DeviceRouting
from dask_devctx.worker.leases import registration
from dask_devctx.worker.leases.registration import NOT_STARTED


async def dask_setup(server: object) -> None:
    """Give a worker the plugin, as the configuration describes it, or a scheduler the routing."""
    if isinstance(server, Scheduler):
        await server.register_scheduler_plugin(
            DeviceRouting(), name=DeviceRouting.name, idempotent=True
        )
    elif isinstance(server, Worker):
        plugin: WorkerPlugin
        # dask logs the exception of a preload and continues: the plugin raises it at the start.
        try:
            plugin = DevicePlugin()
        except Exception as error:
            plugin = _Failing(error)
        set_up_at_start(server, plugin)
    else:
        raise TypeError(
            "dask_devctx is preloaded by workers and schedulers (distributed.worker.preload, "
            f"distributed.scheduler.preload), not by {type(server).__name__}"
        )


# The end of the last line where `dask devctx worker` started the worker.
_OF_COMMAND = "The worker does not start. `dask devctx info` shows what this machine has"
_end = NOT_STARTED


def say_remedies_of_command() -> None:
    """Let the last line of this process have the remedies of ``dask devctx worker``."""
    global _end
    _end = _OF_COMMAND


class _Failing(WorkerPlugin):  # type: ignore[misc]
    """Stands in for a plugin that could not be made."""

    name = DevicePlugin.name

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def setup(self, worker: Worker) -> None:
        await registration.refuse(worker, self._error)
        raise self._error


def _reason(error: BaseException | None) -> BaseException | None:
    """Return the reason why a worker did not start for its devices, among an error's causes."""
    while error is not None and NOT_STARTED not in getattr(error, "__notes__", ()):
        error = error.__cause__
    return error


def _say_why_last(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Show the exception that ends this process, then the reason why the worker did not start."""
    reason = _reason(error)
    frames = walk_tb(traceback)
    if reason is None or not any(_is_command(frame) for frame, _ in frames):
        show(kind, error, traceback)
    if reason is not None:
        text = str(reason).rstrip(".")
        print(f"\ndask_devctx: {type(reason).__name__}: {text}. {_end}", file=sys.stderr)


def _is_command(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("distributed.cli.")


def _without_tracebacks(record: logging.LogRecord) -> bool:
    """Leave the reason to the last line: dask logs it with its traceback three times before."""
    error = record.exc_info[1] if record.exc_info else None
    if _reason(error) is None:
        return True
    record.exc_info = record.exc_text = None
    return record.msg == "Worker plugin %s failed to setup"


def _look_first() -> None:
    """Let ``dask worker --preload dask_devctx`` end with one line if its devices cannot be used."""
    context = click.get_current_context(silent=True)
    command = getattr(context and context.command.callback, "__module__", "")
    # A process that is forked from this one later must find the driver untouched.
    forks = dask.config.get("distributed.worker.multiprocessing-method", "spawn") != "spawn"
    if command != "distributed.cli.dask_worker" or forks:
        return
    try:
        with said():
            usable_options()
    except click.ClickException as error:
        raise click.ClickException(f"{error.format_message().rstrip('.')}. {NOT_STARTED}") from None


# `dask worker` ends with "Worker failed to start." below hundreds of lines of tracebacks. The hook
# is set on import, because the nanny's process imports this module and calls nothing in it.
sys.excepthook = functools.partial(_say_why_last, sys.excepthook)
for _name in ("distributed.nanny", "distributed.worker"):
    logging.getLogger(_name).addFilter(_without_tracebacks)
_look_first()
