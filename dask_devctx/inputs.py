"""The inputs of a worker's tasks: brought to each task's device, before it and in order."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from tornado.ioloop import PeriodicCallback

from dask_devctx.device import Device
from dask_devctx.replicas import Replicas
from dask_devctx.transfer import Stamp, nbytes_by_device, release_held, stamp

logger = logging.getLogger(__name__)

# How often memory is let go of that a copy has read by now, where nothing else is moved.
_RELEASE_INTERVAL_MS = 500


def _release() -> None:
    release_held()


class Inputs:
    """What the tasks of one worker are given, on their devices.

    Parameters
    ----------
    limit
        How much of each device's memory copies may take, as a fraction.

    Notes
    -----
    :meth:`bring` and :meth:`made` are called on the task's thread, inside its device's scope; all
    else from the worker's event loop. One thread of its own starts copies ahead of their tasks.
    """

    metric: Final = "devctx-traffic"

    def __init__(self, limit: float) -> None:
        self.replicas = Replicas(limit=limit)
        # Of the work that makes what a key stands for, where a task of this worker made it.
        self._stamps: dict[Hashable, Stamp] = {}
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="devctx-ahead")
        self._release = PeriodicCallback(_release, _RELEASE_INTERVAL_MS)
        self._release.start()

    def close(self) -> None:
        """Start no more copies, and forget those that are there."""
        self._release.stop()
        self._ahead.shutdown(wait=False, cancel_futures=True)
        self._stamps.clear()
        self.replicas.drop_all()
        release_held()

    def start_moving(self, inputs: Iterable[tuple[Hashable, object]], device: Device) -> None:
        """Begin to copy what a task will need, while it waits for its turn.

        Parameters
        ----------
        inputs
            The keys and values that the worker has by now.
        device
            The task's device. No more is brought than there is room for: what is not brought
            ahead is when the task's turn comes.
        """
        for key, value in inputs:
            places = nbytes_by_device(value)
            places.pop(device, None)
            nbytes = sum(places.values())
            if nbytes and self.replicas.has_room(device, nbytes):
                self._ahead.submit(self._move_ahead, key, value, device)

    def _move_ahead(self, key: Hashable, value: object, device: Device) -> None:
        try:
            self.replicas.get(key, value, device, after=self._stamps.get(key), ahead=True)
        except Exception:  # the task will try for itself, and fail with this if it must
            logger.debug("%r was not brought to %s ahead of its task", key, device, exc_info=True)

    def bring(self, data: Mapping[Hashable, Any], device: Device) -> dict[Hashable, Any]:
        """Return a task's inputs as they are on its device."""
        get, stamps = self.replicas.get, self._stamps
        return {key: get(key, value, device, after=stamps.get(key)) for key, value in data.items()}

    def made(
        self, key: Hashable, result: object, brought: Mapping[Hashable, Any], device: Device
    ) -> None:
        """Note that a task has given all its work to its device, and what it made."""
        after = stamp(result)
        if after is not None:
            self._stamps[key] = after
        elif brought:
            after = stamp(*brought.values())  # its result is on the host, its work may not be done
        self.replicas.used(brought, device, after)

    def drop_replicas(self, device: Device) -> int:
        """Drop the copies on a device whose memory ran out; return their bytes."""
        dropped = self.replicas.drop_all(device)
        release_held()
        return dropped

    def forget(self, key: Hashable) -> None:
        """Drop the copies of what a key stood for: dask has let it go."""
        self._stamps.pop(key, None)
        self.replicas.forget(key)

    def metrics(self, worker: object) -> list[dict[str, Any]]:
        """Return what the worker's heartbeat tells: a row for each pair of devices, plain data.

        ``nbytes`` and ``copies`` count what was moved, ``saved`` the times that a task found its
        input there already; ``seconds`` is the time that threads spent on starting the copies.
        """
        return [
            {
                "source": source.uuid,
                "destination": destination.uuid,
                "nbytes": traffic.nbytes,
                "copies": traffic.copies,
                "saved": traffic.saved,
                "seconds": traffic.seconds,
            }
            for (source, destination), traffic in self.replicas.traffic.items()
        ]
