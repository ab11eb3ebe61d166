"""Advice on a worker that is shown too few tasks to keep its devices busy."""

from __future__ import annotations

import logging

from distributed import Worker

from dask_devctx.config.options import LOOK_AHEAD

logger = logging.getLogger(__name__)


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
