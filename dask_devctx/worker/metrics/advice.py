"""Advice on a worker whose ``nthreads`` is too small to keep its devices busy."""

from __future__ import annotations

import logging

from distributed import Worker

from dask_devctx.config.options import LOOK_AHEAD
from dask_devctx.errors.base import counted

# A child of dask's own: it is a line of the worker's log as dask's own are.
logger = logging.getLogger("distributed.worker.dask_devctx")


class Advice:
    """Warns once if dask gives a worker too few tasks to keep its devices busy."""

    def __init__(self, worker: Worker, running: int) -> None:
        self._worker = worker
        self._text = ""
        nthreads = worker.state.nthreads
        if nthreads < 2 * running:
            enough = LOOK_AHEAD * running
            self._text = (
                f"This worker has nthreads={nthreads}, and its devices run "
                f"{counted(running, 'task')} at a time: dask will not give it enough tasks to keep "
                "them busy, and a queue for one device can keep the other devices waiting. Leave "
                "out threads_per_worker= of LocalDeviceCluster, and --nthreads of dask devctx "
                f"worker; for workers of dask write LocalCluster(threads_per_worker={enough}) or "
                f"dask worker --nthreads {enough}: the devices' own threads run the tasks, and "
                "nthreads limits how many the worker gets ahead"
            )

    def withhold(self) -> None:
        """Log nothing: the cluster has warned its user."""
        self._text = ""

    def give(self) -> None:
        """Log the warning."""
        if self._text:
            logger.warning("%s: %s", self._worker.address, self._text)
            self._text = ""
