"""The values of an answer to another worker that are on devices, and their bytes there."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

from distributed.protocol.serialize import Serialize

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import Stamp, nbytes_by_device
from dask_devctx.worker.comms.device_types import find
from dask_devctx.worker.inputs.inputs import Inputs
from dask_devctx.worker.memory.kept import Kept

Places = dict[Hashable, dict[Device, int]]


def on_devices(
    data: Mapping[Hashable, Any],
    devices: Collection[Device],
    inputs: Inputs | None,
    *,
    staged: bool,
) -> Places:
    """Return the values that are on devices, each with its bytes by device.

    Parameters
    ----------
    data
        The values of the answer, as distributed wraps them.
    devices
        The worker's devices, the first one first.
    inputs
        Knows the work that makes each value; None if no work is known.
    staged
        Whether values in host memory that belong on a device are staged there, and so count.
    """
    return dict(_found(data, devices, inputs, staged))


def _found(
    data: Mapping[Hashable, Any],
    devices: Collection[Device],
    inputs: Inputs | None,
    staged: bool,
) -> Iterator[tuple[Hashable, dict[Device, int]]]:
    first = next(iter(devices))
    for key, wrapped in data.items():
        if not isinstance(wrapped, Serialize):
            continue
        value = wrapped.data
        if value.__class__ is Kept:
            if staged:
                form, _ = value.host_form()
                yield key, {form.home if form.home in devices else first: form.nbytes}
            continue
        after = known_work(inputs, key)
        if after is not None and not after.devices and find(type(value)) is None:
            continue
        try:
            places = nbytes_by_device(value)
        except Exception:  # of a user's type; dask sends the value
            continue
        if not places and find(type(value)) is not None:
            places = {first: 0}
        if places:
            yield key, places


def known_work(inputs: Inputs | None, key: Hashable) -> Stamp | None:
    """Return the stamp of the work that makes a value, if it is known."""
    lifetime = None if inputs is None else inputs.lifetimes.get(key)
    return None if lifetime is None else lifetime.after
