"""The latest of what happened on a worker: tasks, copies, incidents and samples of its devices.

Each kind has a ring of its own, so that many copies do not drop the tasks. A row is a plain tuple,
in the order of the fields of its class in :mod:`dask_devctx.scheduler.rows`. Readers ask for the
rows since a number, and learn how many rows are lost.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

from dask_devctx.cuda.device import Device
from dask_devctx.scheduler.history import Ring
from dask_devctx.scheduler.messages import ANSWER_LIMIT
from dask_devctx.scheduler.rows import KINDS

# Ten minutes of heartbeats.
_SAMPLES: Final = 1200
# Clocks that differ by less are taken for equal.
CLOCKS_DIFFER_S: Final = 1.0


class History:
    """The latest tasks, copies, incidents and samples of one worker, by the scheduler's clock."""

    def __init__(
        self, limit: int, devices: Sequence[Device] = (), offset: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._devices = [(device.uuid, device.device_id) for device in devices]
        self.tasks = Ring(limit)
        self.copies = Ring(limit)
        self.incidents = Ring(limit)
        self.samples = Ring(min(_SAMPLES, limit) * len(devices))
        self.refresh: Callable[[], object] = lambda: None  # it may add rows before an answer
        self._offset = offset
        self._epoch = uuid.uuid4().hex

    def now(self, at: float | None = None) -> float:
        """Return the time, or this one, by the scheduler's clock."""
        offset = self._offset()  # by dask's estimate, which a busy event loop makes worse
        return (at or time.time()) + (offset if abs(offset) > CLOCKS_DIFFER_S else 0.0)

    def copied(
        self,
        source: str,
        destination: str,
        nbytes: int,
        seconds: float,
        transport: str,
        values: int = 1,
        *,
        begun: float | None = None,
        timed: bool = True,
    ) -> None:
        """Note a copy that ended just now, or that began at another time; on any thread."""
        start = self.now() - seconds if begun is None else self.now(begun)
        end = start + seconds
        self.copies.append((source, destination, nbytes, start, end, transport, values, timed))

    def happened(
        self, what: str, uuid: str | None = None, key: Hashable = None, text: str = ""
    ) -> None:
        """Note an incident; on any thread."""
        self.incidents.append((what, self.now(), uuid, key, text))

    def answer(self, epoch: str | None = None, since: Mapping[str, int] | None = None) -> Any:
        """Return the rows since the numbers of the last answer's ``next``: a worker's handler."""
        # In another epoch, which is another plugin's, all numbers begin at 0 again.
        self.refresh()
        numbers = (since or {}) if epoch == self._epoch else {}
        rows, following, lost = {}, {}, {}
        for name in KINDS:
            ring: Ring = getattr(self, name)
            rows[name], following[name], lost[name] = ring.since(numbers.get(name, 0), ANSWER_LIMIT)
        return {
            "epoch": self._epoch,
            "next": following,
            "lost": lost,
            "rows": rows,
            "devices": self._devices,
        }
