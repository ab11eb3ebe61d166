"""How many tasks a worker is shown for each that can run."""

from __future__ import annotations

import logging
from typing import Final

from distributed import Worker

logger = logging.getLogger(__name__)

# A device's tasks run on the device's own threads, so a worker's `nthreads` is how far dask lets it
# look ahead: too few, and threads wait for the scheduler; too many, and results pile up before they
# are used.
LOOK_AHEAD: Final = 8


class Advice:
    """What to change of a worker that is shown too few tasks to keep its devices busy; said once.

    Parameters
    ----------
    worker
        The worker.
    running
        How many tasks its devices run at a time.
    """

    def __init__(self, worker: Worker, running: int) -> None:
        self._worker = worker
        self._text = ""
        nthreads = worker.state.nthreads
        if nthreads < 2 * running:
            self._text = (
                f"This worker has nthreads={nthreads}, and its devices run {running} tasks at a "
                "time: dask will not show it enough tasks to keep them busy, and a queue for one "
                "device can keep the others waiting. Start it with nthreads="
                f"{LOOK_AHEAD * running}, as LocalDeviceCluster does: the devices' own threads run "
                "the tasks, and this says how far ahead it may look"
            )

    def give(self) -> None:
        """Say it, where the client can read it too: the worker's events of ``devctx``."""
        if self._text:
            logger.warning("%s: %s", self._worker.address, self._text)
            self._worker.log_event("devctx", {"level": "warning", "message": self._text})
            self._text = ""
