"""The devices and options of a command, looked at before anything starts: a problem is one line."""

from __future__ import annotations

import click

from dask_devctx.config.options import Options
from dask_devctx.config.packages import require_packages
from dask_devctx.cuda.device import Device, named_devices
from dask_devctx.cuda.inspection import inspect_machine
from dask_devctx.errors import DevctxError


def usable_devices() -> tuple[Options, tuple[Device, ...]]:
    """Return the configured options, and the devices that they name.

    Raises
    ------
    click.ClickException
        A device is missing, or a package, or no device can be used.
    click.UsageError
        An option is wrong.
    """
    try:
        options = Options()
        require_packages(options)
        devices = named_devices(options.devices)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except DevctxError as error:
        raise click.ClickException(str(error)) from error
    if not devices:
        reasons = ". ".join(inspect_machine().problems)
        raise click.ClickException(f"no GPU can be used. {reasons}")
    return options, tuple(devices)
