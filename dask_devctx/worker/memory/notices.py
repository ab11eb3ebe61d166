"""The lines in a worker's log about values that leave their devices, each at a bearable rate."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

from dask.utils import format_bytes

from dask_devctx.cuda.device import Device

logger = logging.getLogger(__name__)

# A device that no values can leave is looked at often, and named in the log so often.
_WARN_EVERY_S: Final = 30.0


class Notices:
    """Lines that are logged once, or now and then.

    Parameters
    ----------
    worker_name
        The worker.
    """

    def __init__(self, worker_name: str) -> None:
        self._worker_name = worker_name
        self._kinds: set[type] = set()
        self._spilled = False
        self._failed_at: dict[Device, float] = {}

    def spilled(self, device: Device, limit: int) -> None:
        """Say, the first time, that values leave a device."""
        if self._spilled:
            return
        self._spilled = True
        logger.warning(  # once: dask shows no lines of a lower level
            "%s: %s holds more than its limit of %s: values go to host memory, and come back "
            "before their tasks (device_memory_limit). report(client).devices counts them",
            self._worker_name,
            device,
            format_bytes(limit),
        )

    def stays(self, value: object, error: Exception) -> None:
        """Say, once for a type, that its values cannot leave."""
        kind = type(value)
        if kind not in self._kinds:
            self._kinds.add(kind)
            logger.warning(
                "values of the type %s stay on their devices, whatever the limit: they cannot be "
                "pickled without their device memory (%s: %s)",
                kind.__qualname__,
                type(error).__name__,
                error,
            )

    def failed(self, device: Device, error: Exception) -> None:
        """Say that no values could leave a device."""
        if monotonic() - self._failed_at.get(device, float("-inf")) >= _WARN_EVERY_S:
            self._failed_at[device] = monotonic()
            logger.warning("no values left %s", device, exc_info=error)
