"""The layout of a cluster: its workers, the devices of each, and the devices that are free."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_devctx import driver
from dask_devctx.config.options import Options, fair_memory
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device, devices, named_devices
from dask_devctx.dask_internals.scheduler import LOOK_AHEAD
from dask_devctx.errors import VisibleDevicesError, counted, held_text, in_use
from dask_devctx.plugin import held_devices

logger = logging.getLogger(__name__)


@dataclass
class Layout:
    """The workers of a cluster on this machine."""

    given: Options
    options: Mapping[str, Any]  # those of the workers, with their devices
    devices: tuple[Device, ...]  # that the cluster may use
    n_workers: int  # how many it starts
    share: int | None  # how many devices each worker has for itself; None where it has all of them
    free: tuple[Device, ...]  # those that no others hold now

    @property
    def per_worker(self) -> int:
        """How many devices a worker uses."""
        return self.share or len(self.free)

    @property
    def nthreads(self) -> int:
        """How many tasks dask gives a worker at a time."""
        return LOOK_AHEAD * max(self.per_worker * self.given.tasks_per_device, 1)

    @property
    def memory_limit(self) -> int:
        """The host memory of a worker, in bytes."""
        together = 1 if self.share else max(self.n_workers, 1)  # workers that share devices
        return fair_memory(self.per_worker) // together

    def check(self, n_workers: int) -> None:
        """Refuse more workers than have devices."""
        share = self.share or 0
        if n_workers * share > len(self.devices):
            raise ValueError(
                f"{counted(n_workers, 'worker')} with {counted(share, 'device')} each would need "
                f"{n_workers * share}, and the cluster has {len(self.devices)}. Start fewer workers"
                + (", or pass a lower devices_per_worker" if share > 1 else "")
            )


def lay_out(options: Options, n_workers: int | None, *, processes: bool) -> Layout:
    """Return the layout of a new cluster, or of more workers of one that is there."""
    if n_workers is not None and n_workers < 0:
        raise ValueError(f"n_workers must be 0 or more, or None for the default, got {n_workers}")
    used = named_devices(options.devices)
    if not used:
        found = discovery.inventory(driver.backend())
        why = ". ".join(["it hides all devices of this machine", *found.problems])
        raise VisibleDevicesError(
            f"CUDA_VISIBLE_DEVICES is {found.visible_devices!r}: {why}. Unset it, or name devices "
            "in it"
        )
    taken: Mapping[Device, str] = {}
    if not options.shared and n_workers != 0:
        taken = held_devices(devices())
    free = tuple(device for device in used if device not in taken)
    held = {device: taken[device] for device in used if device in taken}
    wanted = (options.devices_per_worker or 1) * (n_workers or 1)
    if options.devices is not None and None in (n_workers, options.devices_per_worker):
        wanted = len(used)  # all devices that are named are needed
    if len(free) < wanted <= len(used):
        left = [device for device in devices() if device not in taken]
        raise in_use("this cluster", wanted, left, held)
    own: dict[str, Any] = {}
    started = default_n_workers(free, options, processes) if n_workers is None else n_workers
    if n_workers is None and held:
        used = free  # later, too, it uses no others
    if options.devices is not None or used is free:  # a worker may see them in another order
        own["devices"] = tuple(device.uuid for device in used)
    share, divided = options.devices_per_worker, options.devices_per_worker is None
    if divided:
        among = started or default_n_workers(free, options, processes)
        if not options.shared or 1 < among <= len(free):
            share = max(len(free) // among, 1)
    own["devices_per_worker"] = share
    left_over = len(free) - started * (share or len(free))
    if started and left_over > 0 and (divided or n_workers is None):
        workers, idle = counted(started, "worker"), counted(left_over, "device")
        logger.warning("%s will use %s each: %s will be idle", workers, share, idle)
    layout = Layout(options, own, used, started, share, free)
    layout.check(started)
    if held:
        names = ", ".join(map(str, free)) or "none now"
        logger.warning("The devices in use are those that are free, %s: %s", names, held_text(held))
    return layout


def default_n_workers(used: Sequence[Device], options: Options, processes: bool) -> int:
    """Return the number of workers for these devices, where none is given."""
    if not processes or len(used) < 2:
        return 1
    if options.devices_per_worker is not None:
        return max(len(used) // options.devices_per_worker, 1)
    # MIG instances, and the Windows Subsystem for Linux, show no memory to other processes.
    on_wsl = "microsoft" in platform.release().lower() and not driver.backend().simulated
    if options.ipc is False or on_wsl or any(one.uuid.startswith("MIG-") for one in used):
        return 1
    return len(used)
