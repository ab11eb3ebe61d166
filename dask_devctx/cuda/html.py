"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from dask_devctx.cuda import discovery
from dask_devctx.errors import DevctxError

if TYPE_CHECKING:
    from dask_devctx.cuda.device import Device


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table of two columns, as HTML."""
    body = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<div><strong>{escape(title)}</strong><table>{body}</table></div>"


def of_device(device: Device) -> str:
    """Return what is known of a device, as HTML; this creates no context."""
    try:
        info = device.info
    except DevctxError as error:  # it was unpickled where it does not exist
        return html_table("Device", {"uuid": device.uuid, "problem": str(error)})
    memory = discovery.memory_info(device._backend, info)
    rows = {"name": info.name, "uuid": info.uuid, "PCI bus id": info.pci_bus_id}
    if memory is not None:
        free, total = (f"{nbytes / 2**30:.1f} GiB" for nbytes in memory)
        rows["memory"] = f"{free} of {total} free"
    known = {name: value for name, value in rows.items() if value is not None}
    return html_table(f"Device cuda:{info.device_id}", known)
