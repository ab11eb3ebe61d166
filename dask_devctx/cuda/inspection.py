"""Questions about the machine's devices: the report of ``dask devctx info``, shared memory.

None of them creates a context in this process.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dask_devctx import driver
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import DeviceInfo
from dask_devctx.errors import DevctxError

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 30.0
_ASK_NBYTES = 2 * 2**20
_ASK = "from dask_devctx.cuda.inspection import answer; answer()"


@dataclass(frozen=True)
class Machine:
    """The devices of a machine, as this process may use them."""

    devices: tuple[DeviceInfo, ...]  # in CUDA's order
    hidden: tuple[DeviceInfo, ...]  # by CUDA_VISIBLE_DEVICES
    memory: dict[str, tuple[int, int] | None]  # free and total bytes, by UUID, if NVML says it
    peers: dict[str, tuple[str, ...]]  # the devices whose memory each can reach, by their UUIDs
    visible_devices: str | None  # the value of CUDA_VISIBLE_DEVICES
    device_order: str | None  # of CUDA_DEVICE_ORDER
    cuda_version: str | None  # that the driver supports, "13.0"
    simulated: bool
    problems: tuple[str, ...]  # in words for a person

    @property
    def usable(self) -> bool:
        """Whether there is a device that CUDA shows too."""
        return bool(self.peers)


def inspect_machine() -> Machine:
    """Return the machine's devices and the problems with them; a problem raises no error."""
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


# -- memory that processes share


def can_export(devices: Sequence[Device]) -> bool:
    """Return whether other processes may open memory that is allocated on each device."""
    # MIG instances and the Windows Subsystem for Linux cannot do this. Simulated devices can.
    # The question needs a context, which this process would keep: another process finds out.
    if all(device._backend.simulated for device in devices):
        return True
    if any(device.uuid.startswith("MIG-") for device in devices):
        return False
    return _asked(tuple(device.uuid for device in devices))


@functools.cache
def _asked(uuids: tuple[str, ...]) -> bool:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK, *uuids],
            env=env,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning(
            "could not find out whether devices can share memory between processes: %s", error
        )
        return False
    if done.returncode:
        logger.info("devices cannot share memory between processes: %s", done.stderr.strip())
    return done.returncode == 0


def answer() -> None:
    """End this process with status 0 if each device in its arguments can export memory."""
    try:
        for uuid in sys.argv[1:]:
            with Device(uuid) as device:
                calls = device._backend.calls
                calls.work.ipc_export(calls.work.allocate(_ASK_NBYTES))
    except DevctxError as error:
        sys.exit(str(error))
