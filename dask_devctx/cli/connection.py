"""The options by which a command finds a scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import dask
from dask.utils import parse_timedelta
from distributed import Client
from distributed.comm import get_address_host
from distributed.core import coerce_to_address
from distributed.security import Security

from dask_devctx.client.layout import used_devices
from dask_devctx.config.options import Options, is_ucx, require_packages, require_ucx
from dask_devctx.errors import DevctxError

Function = TypeVar("Function", bound=Callable[..., Any])

_PEM = click.Path(exists=True, resolve_path=True)


def _duration(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return a duration as given, if dask can read it."""
    try:
        parse_timedelta(value)
    except (KeyError, ValueError):  # its own text lists 40 units
        raise click.BadParameter(
            f"a number with a unit, such as 10s or 500ms, got {value!r}"
        ) from None
    return value


def finds_scheduler(function: Function) -> Function:
    """Decorate a command that takes the options of :func:`connected`."""
    wait = {"default": "10s", "show_default": True, "callback": _duration}
    options: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("--scheduler-file", "As of dask scheduler.", {"type": click.Path(exists=True)}),
        ("--tls-ca-file", "Certificates of authorities, in PEM format.", {"type": _PEM}),
        ("--tls-cert", "The client's certificate, in PEM format.", {"type": _PEM}),
        ("--tls-key", "The certificate's private key, in PEM format.", {"type": _PEM}),
        ("--timeout", "How long to wait for the scheduler.", wait),
    )
    for name, text, more in reversed(options):
        function = click.option(name, help=text, **more)(function)
    return function


@contextmanager
def said() -> Iterator[None]:
    """Let a wrong option end a command with status 2, and a machine that lacks something with 1."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    except (DevctxError, ImportError) as error:
        raise click.ClickException(str(error)) from error


def usable_options() -> Options:
    """Return the configured options; refuse them where a device or a package is missing."""
    options = Options()
    require_packages(options)
    used_devices(options)
    return options


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
        if is_ucx(address):  # without UCX, dask raises a warning
            require_ucx(address.partition(":")[0])
        try:
            get_address_host(address)
        except ValueError as error:
            raise ValueError(
                f"the scheduler's address must be like tcp://scheduler:8786, got {address!r}: "
                f"{error}"
            ) from error
    return address


def cluster_address(address: str | None, scheduler_file: str | None) -> str:
    """Return the address by which workers name their cluster; "" if it is not known yet."""
    if scheduler_file:
        try:
            address = json.loads(Path(scheduler_file).read_text("utf-8"))["address"]
        except (OSError, ValueError, KeyError, TypeError):  # dask waits for it
            return ""
    return coerce_to_address(address) if address else ""


def connected(
    scheduler: str | None,
    scheduler_file: str | None,
    tls_ca_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    timeout: str,
) -> Client:
    """Return a client of a scheduler."""
    address = scheduler_address(scheduler, scheduler_file)
    tls = {"tls_ca_file": tls_ca_file, "tls_client_cert": tls_cert, "tls_client_key": tls_key}
    given = {name: value for name, value in tls.items() if value is not None}
    where: dict[str, Any] = {"scheduler_file": scheduler_file} if scheduler_file else {}
    try:
        return Client(
            None if scheduler_file else address,
            timeout=timeout,
            security=Security(**given) if given else None,
            set_as_default=False,
            **where,
        )
    except (OSError, TimeoutError, ValueError) as error:
        raise click.ClickException(
            f"no scheduler at {address or scheduler_file}: {error}"
        ) from error
