"""Where data leaves for elsewhere: not before the work that makes it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from distributed import Worker

from dask_devctx.worker.inputs import Inputs


class Departures:
    """While it is open, what a worker sends is read after the work that makes it.

    Parameters
    ----------
    worker
        The worker.
    inputs
        Knows that work.

    Notes
    -----
    dask serializes what is asked for on the threads of the event loop and of the ``offload``
    executor, whose current streams are the libraries' default ones. They know nothing of a stream
    that a task made for itself, and would read what it has not written yet.
    """

    def __init__(self, worker: Worker, inputs: Inputs) -> None:
        self._handlers: dict[str, Any] = worker.handlers
        self._inputs = inputs
        self._get_data = self._handlers["get_data"]
        self._handlers["get_data"] = self._after_its_work

    def close(self) -> None:
        """Send as before, unless somebody else has taken that over since."""
        if self._handlers["get_data"] == self._after_its_work:
            self._handlers["get_data"] = self._get_data

    async def _after_its_work(self, comm: Any, keys: Collection[Hashable], **kwargs: Any) -> Any:
        self._inputs.hold_back_for(keys)
        return await self._get_data(comm, keys=keys, **kwargs)
