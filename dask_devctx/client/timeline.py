"""The timeline of a cluster's devices as a file for Perfetto and chrome://tracing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from distributed import Client, Scheduler

from dask_devctx.client.live import refuse_unusable
from dask_devctx.client.trace_events import Stretch, trace
from dask_devctx.errors import DevctxError
from dask_devctx.errors.base import counted
from dask_devctx.scheduler.history import DeviceHistory
from dask_devctx.scheduler.rows import Sample

# Inside a `with`, the rows are read this often, so that none are dropped before the end.
_INTERVAL_S: Final = 1.0


class Timeline:
    """The timeline of a cluster's devices in a file; :func:`timeline` makes it.

    Attributes
    ----------
    path
        The file.
    tasks, copies
        The number of tasks and of copies in the file.
    lost
        How many rows of the history were dropped before they were read.
    """

    def __init__(self, client: Client, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tasks = self.copies = self.lost = 0
        self._client = client
        self._stretch = Stretch()
        self._number = 0
        self._last_sample = 0.0
        self._reading: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        lost = f", {self.lost} rows lost" if self.lost else ""
        tasks = counted(self.tasks, "task")
        copies = f"{self.copies} {'copy' if self.copies == 1 else 'copies'}"
        return f"<timeline {str(self.path)!r}: {tasks}, {copies}{lost}>"

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.written().__await__()

    async def written(self) -> Self:
        """Write all that the cluster remembers, or that was read, and return this."""
        await self._read()
        content = trace(self._stretch)
        about = content["otherData"]
        self.tasks, self.copies, self.lost = about["tasks"], about["copies"], about["lost_rows"]
        self.path.write_text(json.dumps(content), encoding="utf-8")
        return self

    # -- for a stretch of work

    def __enter__(self) -> Self:
        self._client.sync(self.__aenter__)
        return self

    def __exit__(self, *error: object) -> None:
        self._client.sync(self.__aexit__)

    async def __aenter__(self) -> Self:
        await self._read()  # so that rows of earlier work are not in its way
        self._stretch = Stretch()
        self._reading = asyncio.ensure_future(self._read_often())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        await self.written()

    async def _read_often(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            with suppress(OSError):  # the end reads again, and raises
                await self._read()

    async def _read(self) -> None:
        """Read the rows since the last time."""
        found: Any = await self._client.run_on_scheduler(
            _of_scheduler, since=self._number, samples_since=self._last_sample
        )
        if found is None:
            raise DevctxError(
                "no timeline was made, because the scheduler does not have the plugin of "
                "dask-devctx. The plugin comes with the first worker that has devices: "
                "client.register_plugin(DevicePlugin()), and install dask-devctx where the "
                "scheduler runs"
            )
        reading, samples, devices, workers = found
        stretch = self._stretch
        stretch.rows += reading.rows
        stretch.samples += samples
        stretch.devices, stretch.workers = devices, workers
        stretch.lost += reading.lost
        self._number = reading.next
        self._last_sample = max((one.time for _, one in samples), default=self._last_sample)


def timeline(client: Client, path: str | os.PathLike[str]) -> Timeline:
    """Write what ran on a cluster's devices as a trace, for https://ui.perfetto.dev.

    Parameters
    ----------
    client
        A client of the cluster; with an asynchronous one, use ``await`` or ``async with``.
    path
        The file that is written, such as ``"timeline.json"``. chrome://tracing opens it too.

    Returns
    -------
    Timeline
        The numbers of tasks and copies, and of rows that are lost. The file has all that the
        workers remember: ``devctx.history`` rows each. With ``with``, the file is written again at
        the end, and has only what happened inside.

    Raises
    ------
    DevctxError
        The scheduler does not have the plugin.
    OSError
        The file cannot be written.
    TypeError
        The first argument is no client, or the second no path.
    ValueError
        The client is closed.

    Notes
    -----
    A process of the trace is a worker, and a thread is a device. Copies are slices on both ends,
    with an arrow. Within a worker, a copy of 1 MiB or more lasts for as long as the device needs;
    smaller ones are not timed. Counters show memory, utilisation and the tasks on a device.

    Examples
    --------
    ::

        timeline(client, "all.json")
        with timeline(client, "training.json"):
            client.gather(client.map(train, parts))
    """
    if isinstance(client, str | os.PathLike) and isinstance(path, Client):
        raise TypeError(f"timeline(client, path): the client comes first, got {client!r}")
    refuse_unusable(client, "timeline(Client(cluster), path)")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"timeline(client, path) takes the path of a file, got {path!r}")
    made = Timeline(client, path)
    if not client.asynchronous:
        client.sync(made.written)
    return made


async def _of_scheduler(dask_scheduler: Scheduler, since: int, samples_since: float) -> Any:
    history = DeviceHistory.of(dask_scheduler)
    if history is None:
        return None
    await history.collect()
    samples: list[tuple[str, Sample]] = [
        (worker, one)
        for (worker, _), kept in history.samples.items()
        for one in kept
        if one.time > samples_since
    ]
    reading = history.read(since)
    return reading, samples, history.devices, history.workers
