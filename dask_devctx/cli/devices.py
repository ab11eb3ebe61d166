"""The options and devices of a command, looked at before anything starts: a problem is one line."""

from __future__ import annotations

from collections.abc import Sequence

import click

from dask_devctx.client.layout import default_n_workers, least_wanted
from dask_devctx.config.options import Options
from dask_devctx.config.packages import require_packages
from dask_devctx.cuda.device import Device, named_devices
from dask_devctx.cuda.inspection import inspect_machine
from dask_devctx.errors import DevctxError, LockDirectoryError
from dask_devctx.errors.base import counted
from dask_devctx.errors.leases import held_text
from dask_devctx.plugin import held_devices

# The remedies where other workers hold devices.
_TAKEN = (
    "Name other devices with --devices, end the processes that hold these, or let both use them: "
    "--shared"
)


def usable_devices() -> tuple[Options, tuple[Device, ...]]:
    """Return the configured options, and the devices that they name."""
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


def free_devices(
    used: Sequence[Device],
    options: Options,
    n_workers: int | None,
    *,
    cluster: str,
    processes: bool,
) -> tuple[Device, ...]:
    """Return those of a command's devices that its workers can have; say who holds the others."""
    if options.shared:
        return tuple(used)
    try:
        held = held_devices(used, in_process=False, cluster=cluster)
    except LockDirectoryError as error:
        raise click.ClickException(str(error)) from error
    if not held:
        return tuple(used)
    alone = (n_workers or default_n_workers(used, options, processes=processes)) == 1
    if alone and options.devices_per_worker is None:  # it shares with others of its own cluster
        held = {device: who for device, who in held.items() if not who.endswith(f" of {cluster}")}
    if not held:
        return tuple(used)
    free = tuple(device for device in used if device not in held)
    text = held_text({str(device): who for device, who in held.items()})
    wanted = least_wanted(len(used), options, n_workers)
    if not free:
        raise click.ClickException(f"no device is free: {text}. {_TAKEN}")
    if len(free) < wanted <= len(used):  # more than there are is another mistake
        raise click.ClickException(
            f"the workers want {counted(wanted, 'device')} for themselves, and "
            f"{len(free)} of {len(used)} {'is' if len(free) == 1 else 'are'} free: {text}. {_TAKEN}"
        )
    names = ", ".join(map(str, free))
    click.echo(f"The workers use the devices that are free, {names}: {text}", err=True)
    return free
