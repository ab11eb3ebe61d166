"""The report of ``dask devctx info``: the machine's devices. It creates no context."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dask_devctx import driver
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.discovery import DeviceInfo
from dask_devctx.errors import DevctxError


@dataclass(frozen=True)
class Machine:
    """The devices of a machine, as this process may use them.

    Parameters
    ----------
    devices
        The devices that this process may use, in CUDA's order.
    hidden
        The devices that ``CUDA_VISIBLE_DEVICES`` hides.
    memory
        Free and total bytes of each device by its UUID; None if NVML does not say.
    peers
        The UUIDs of the devices whose memory each one can reach, by its UUID.
    visible_devices, device_order
        ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``, or None.
    cuda_version
        The CUDA version that the driver supports, ``"13.0"``; None without a driver.
    simulated
        Whether the devices are simulated.
    problems
        The problems that were found, in words for a person.
    """

    devices: tuple[DeviceInfo, ...]
    hidden: tuple[DeviceInfo, ...]
    memory: dict[str, tuple[int, int] | None]
    peers: dict[str, tuple[str, ...]]
    visible_devices: str | None
    device_order: str | None
    cuda_version: str | None
    simulated: bool
    problems: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether there is a device that CUDA shows too."""
        return bool(self.peers)


def inspect_machine() -> Machine:
    """Return the machine's devices and the problems with them; a problem raises no error.

    Notes
    -----
    Initialises the CUDA driver, which creates no context.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    order = os.environ.get("CUDA_DEVICE_ORDER")
    try:
        backend = driver.backend()
        found = discovery.inventory(backend)
    except DevctxError as error:
        return Machine((), (), {}, {}, visible, order, None, False, (str(error),))
    problems = list(found.problems)
    if not found.devices and not problems:
        hidden = f", {len(found.hidden)} are hidden" if found.hidden else ""
        problems.append(f"CUDA_VISIBLE_DEVICES={visible!r} shows no device{hidden}")
    version = None
    peers: dict[str, tuple[str, ...]] = {}
    if found.devices:
        try:
            number = backend.driver().version()
            version = f"{number // 1000}.{number % 1000 // 10}"
        except DevctxError as error:
            problems.append(str(error))
        else:
            for info in found.devices:
                try:
                    peers[info.uuid] = _peers(info, found.devices)
                except DevctxError as error:
                    problems.append(str(error))
    return Machine(
        devices=found.devices,
        hidden=found.hidden,
        memory={info.uuid: discovery.memory_info(backend, info) for info in found.devices},
        peers=peers,
        visible_devices=visible,
        device_order=order,
        cuda_version=version,
        simulated=backend.simulated,
        problems=tuple(dict.fromkeys(problems)),
    )


def _peers(info: DeviceInfo, others: tuple[DeviceInfo, ...]) -> tuple[str, ...]:
    device = Device(info.uuid)
    discovery.driver_ordinal(driver.backend(), info)  # raises if CUDA hides it, also without peers
    return tuple(
        other.uuid
        for other in others
        if other.uuid != info.uuid and device.can_access_peer(other.uuid)
    )
