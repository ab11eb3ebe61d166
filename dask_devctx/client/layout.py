"""The layout of a cluster: its workers, the devices of each, and the devices that are free."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence

from dask_devctx.config.options import LOOK_AHEAD, Options
from dask_devctx.cuda.device import Device, devices
from dask_devctx.cuda.inspection import can_export
from dask_devctx.errors import DevicesInUseError
from dask_devctx.errors.base import counted, nbytes_text
from dask_devctx.graph.calls import users_level
from dask_devctx.plugin import held_devices

logger = logging.getLogger(__name__)


def default_n_workers(used: Sequence[Device], options: Options, *, processes: bool) -> int:
    """Return the number of workers for these devices, where none is given."""
    if not processes or len(used) < 2:
        return 1
    if options.devices_per_worker is not None:
        return max(len(used) // options.devices_per_worker, 1)
    return len(used) if options.ipc is not False and can_export(used) else 1


def look_ahead(n_devices: int, options: Options) -> int:
    """Return how many tasks dask gives a worker with so many devices at a time."""
    return LOOK_AHEAD * max(n_devices * options.tasks_per_device, 1)


def even_share(n_devices: int, n_workers: int) -> int:
    """Return how many devices each worker gets; warn of devices that are left over."""
    share = n_devices // n_workers
    warn_of_idle(n_workers, share, n_devices)
    return max(share, 1)


def warn_of_idle(n_workers: int, share: int | None, n_devices: int) -> None:
    """Warn of devices that no worker uses, where each uses a share of them; None is all."""
    left_over = 0 if share is None else n_devices - n_workers * share
    if share and left_over > 0:
        warnings.warn(
            f"{counted(n_workers, 'worker')} will use {share * n_workers} of the {n_devices} "
            f"devices, {share} each: {counted(left_over, 'device')} will be idle",
            stacklevel=users_level(),
        )


def warn_of_threads(given: int, n_devices: int, options: Options) -> None:
    """Warn of a number of threads that is too small, or meant for the tasks of a device."""
    running = n_devices * options.tasks_per_device
    if given < 2 * running:
        logger.warning(
            "threads_per_worker=%s is how many tasks dask gives a worker at a time, and its "
            "devices run %s: they will wait for tasks. Leave threads_per_worker out",
            given,
            running,
        )
    if options.tasks_per_device == 1 < given:
        logger.warning(
            "threads_per_worker=%s is how many tasks dask gives a worker at a time, and each "
            "device runs one of them; for %s tasks at a time on each device: tasks_per_device=%s",
            *[given] * 3,
        )


def warn_of_limit(limit: float | str | None, used: Sequence[Device]) -> None:
    """Warn of a ``device_memory_limit`` in bytes that is more than the memory of devices."""
    if not isinstance(limit, int | float) or limit <= 1:
        return
    totals = {device: device.info.total_memory for device in used}
    small = [device for device, total in totals.items() if total is not None and limit > total]
    if small:
        more = f" and of {len(small) - 1} more" if len(small) > 1 else ""
        warnings.warn(
            f"device_memory_limit is {nbytes_text(int(limit))}, and the memory of {small[0]}{more} "
            f"is {nbytes_text(totals[small[0]])}: it limits nothing there. Leave it out for 0.8 of "
            "each device, or give a fraction",
            stacklevel=users_level(),
        )


def held_by_others(
    used: Sequence[Device], options: Options, n_workers: int | None, *, in_process: bool
) -> Mapping[Device, str]:
    """Return those of a new cluster's devices that others hold, with their holders."""
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
