"""The parts of a worker that its transfers to and from other workers share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from distributed import Worker

from dask_devctx.config.options import is_ucx
from dask_devctx.cuda.device import Device
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.ipc.receiving import OpenedBuffers
from dask_devctx.transfer.ipc.sending import Staging
from dask_devctx.transfer.traffic import Traffic as Counts

if TYPE_CHECKING:
    from dask_devctx.worker.values.store import Store

# The name of staged values among distributed's serializers, and of a message's entry about them.
FAMILY: Final = "devctx-ipc"
# Values up to this size change no thread, if their copies take only microseconds.
QUICK_NBYTES: Final = 2**20
QUICK_S: Final = 300e-6

# Each thread waits for the devices of one transfer.
_THREADS: Final = 16
# Each heartbeat carries all rows. In a large cluster, a worker sends to a thousand others.
_MOST_ROWS: Final = 256
_OTHERS: Final = "other workers"


class Traffic:
    """Counts transfers between this worker and others, by source, destination and transport.

    ``by_dask`` is the transport of the values that dask sends: ``"host"``, or ``"ucx"``.
    """

    def __init__(self, by_dask: str = "host") -> None:
        self.by_dask = by_dask
        self.reasons: dict[str, str] = {}  # why values last went through the host, by destination
        # Called with the ends, the bytes, the seconds, the transport and the number of values.
        self.on_copy: Callable[[str, str, int, float, str, int], object] | None = None
        self._rows: dict[tuple[str, str, str], Counts] = {}

    def count(
        self,
        source: str,
        destination: str,
        transport: str,
        nbytes: int,
        seconds: float = 0.0,
        copies: int = 1,
    ) -> str:
        """Count a transfer between two ends, a device's UUID or a worker's address each.

        Return the destination in the row: the last workers of a large cluster share one.
        """
        ends = source, destination, transport
        if ends not in self._rows and transport == self.by_dask and len(self._rows) >= _MOST_ROWS:
            ends = source, _OTHERS, transport
        row = self._rows.setdefault(ends, Counts())
        row.nbytes += nbytes
        row.copies += copies
        if seconds:
            row.seconds = row.measured_s = row.seconds + seconds
            row.measured_nbytes += nbytes
        if self.on_copy is not None:
            self.on_copy(source, destination, nbytes, seconds, transport, copies)
        return ends[1]

    def sent_by_dask(
        self, places: Mapping[Hashable, Mapping[Device, int]], who: str, reason: str
    ) -> None:
        """Count values that dask sends to a worker, each with its bytes by device."""
        for each in places.values():
            for device, nbytes in each.items():
                self.reasons[self.count(device.uuid, who, self.by_dask, nbytes)] = reason

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each source, destination and transport, as plain data."""
        return [
            {
                "source": source,
                "destination": destination,
                "transport": transport,
                **vars(row),
                "reason": self.reasons.get(destination) if transport == "host" else None,
            }
            for (source, destination, transport), row in self._rows.items()
        ]


@dataclass(eq=False)
class Local:
    """One worker, its devices, and the memory that it shows to others and opens of them."""

    worker: Worker
    devices: Sequence[Device]
    store: Callable[[], Store | None]  # the values; None without devices
    make_room: Callable[[Device], object]  # called with a device that has no memory left
    on_failure: Callable[[Device, DriverError], object]
    has_failed: Callable[[], bool]  # whether a device of the worker has failed
    stagings: dict[Device, Staging] = field(default_factory=dict)
    opened: OpenedBuffers = field(default_factory=OpenedBuffers)

    def __post_init__(self) -> None:
        self.traffic = Traffic("ucx" if is_ucx(self.worker.address) else "host")
        self.name = uuid.uuid4().hex  # of its staging memory
        self.executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="devctx-ipc")

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on a thread that may wait."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)

    def failed(self, device: Device, error: Exception) -> bool:
        """Return whether an error means that a device, or CUDA here, has failed; then say so."""
        if not isinstance(error, DriverError):
            return False
        if error.code not in statuses.STICKY:
            if error.code not in statuses.GONE:
                return False
            try:
                with device:
                    device._backend.calls.work.probe()
                return False
            except DevctxError:
                pass
        self.on_failure(device, error)
        return True
