"""The devices that are free for a new cluster: other clusters of the machine hold the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_devctx.config.options import Options
from dask_devctx.cuda.device import Device, devices
from dask_devctx.errors import DevicesInUseError
from dask_devctx.plugin import held_devices


def held_by_others(
    used: Sequence[Device], options: Options, n_workers: int | None, *, in_process: bool
) -> Mapping[Device, str]:
    """Return those of a new cluster's devices that others hold, with their holders.

    Parameters
    ----------
    used
        The devices that the cluster names, or all.
    options
        The options of its plugin.
    n_workers
        The number of its workers; None where none is given.
    in_process
        Whether its workers run in this process.

    Raises
    ------
    DevicesInUseError
        Fewer devices are free than the cluster needs.
    LockDirectoryError
        The directory of the locks cannot be trusted, or cannot be used.
    """
    if options.shared or n_workers == 0:
        return {}
    alone = in_process and options.devices_per_worker is None and n_workers in (None, 1)
    held = held_devices(used, in_process=alone)
    wanted = least_wanted(len(used), options, n_workers)
    if len(used) - len(held) < wanted <= len(used):
        others = [device for device in devices() if device not in held]
        free = [d for d in others if d not in held_devices(others, in_process=alone)]
        raise DevicesInUseError(
            wanted,
            [str(device.info) for device in free],
            {str(device.info): who for device, who in held.items()},
            by_cluster=True,
        )
    return held


def least_wanted(n_used: int, options: Options, n_workers: int | None) -> int:
    """Return how many devices a cluster needs at least; devices that are named are all needed."""
    is_named = options.devices is not None
    if options.devices_per_worker is not None:
        most = n_used // options.devices_per_worker if is_named else 1
        return options.devices_per_worker * (max(most, 1) if n_workers is None else n_workers)
    if is_named:
        return n_used if n_workers is None else n_used // n_workers * n_workers
    return n_workers or 1
