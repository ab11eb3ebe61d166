"""Whether other processes may open the memory of devices: asked without a context here."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Sequence

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 30.0
_ASK_NBYTES = 2 * 2**20
_ASK = "from dask_devctx.cuda.exports import answer; answer()"


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
