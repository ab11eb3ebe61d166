"""The address of a command's scheduler, and how a command ends on errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
import dask
from distributed.comm import get_address_host

from dask_devctx.config.options import require_ucx
from dask_devctx.errors import DevctxError


@contextmanager
def said() -> Iterator[None]:
    """Let a wrong option end a command with status 2, and a machine that lacks something with 1."""
    try:
        yield
    except (DevctxError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def scheduler_address(scheduler: str | None, scheduler_file: str | None) -> str | None:
    """Return the address of a command's scheduler; None where only its file is given."""
    address: str | None = scheduler or dask.config.get("scheduler-address", None)
    if scheduler_file and not scheduler:
        return address
    if not address:
        raise click.UsageError(
            "no scheduler: give its address, as tcp://scheduler:8786, or --scheduler-file"
        )
    with said():
        require_ucx(address)
        get_address_host(address)  # raises where it is none
    return address
