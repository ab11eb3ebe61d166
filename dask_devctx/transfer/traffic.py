"""Copies between devices: direct access, the copy itself, and counts and times of the copies."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.driver.backends import ProcessLock
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.errors import DevctxError, DeviceMemoryError, DriverError
from dask_devctx.transfer import copy_streams
from dask_devctx.transfer.events import Event

logger = logging.getLogger(__name__)

_lock = ProcessLock()  # a ``__del__`` may copy, too


def connect(device: Device, peer: Device) -> bool:
    """Give two devices access to each other's memory; False where copies go through the host."""
    calls = device._backend.calls
    # A primary context that was released comes back with its old handle but without its peers.
    pair = frozenset(calls.context_id(each.primary_context.handle) for each in (device, peer))
    with _lock:
        known = device._backend.peers
        found = known.get(pair)
        if found is None:
            try:
                found = known[pair] = _enable(device, peer) and _enable(peer, device)
            except DeviceMemoryError:  # later, there may be enough
                return False
    return found


def _enable(device: Device, peer: Device) -> bool:
    if not device.can_access_peer(peer):
        return False
    try:
        context = peer.primary_context.handle
        with device:
            device._backend.calls.enable_peer_access(context)
    except DriverError as error:  # too many peers, for example: copies are slower, but correct
        logger.info("%s does not reach %s directly: %s", device, peer, error)
        if isinstance(error, DeviceMemoryError):
            raise
        return False
    return True


def copy_bytes(
    target: int, device: Device, source: int, source_device: Device, nbytes: int, stream: int
) -> None:
    """Enqueue a copy from one device to another, in a stream of ``device``, which is current."""
    if not nbytes:
        return
    own, other = device.primary_context.handle, source_device.primary_context.handle
    way = stream
    if stream == LEGACY_STREAM:
        # In this stream, a copy between devices waits for all work of both and delays all later
        # work of both.
        way = copy_streams.shared(device, "moves")._stream
        Event(device).record(stream).holds_back(way)
    with timed(device, source_device, nbytes, way):
        device._backend.calls.work.copy_peer(target, own, source, other, nbytes, way)
    if way != stream:
        Event(device).record(way).holds_back(stream)


def is_dense(strides: Any, shape: Any, itemsize: int = 1) -> bool:
    """Return whether an array's elements fill a stretch of memory in some order of the axes."""
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length != 1:
            if stride != itemsize:
                return 0 in shape
            itemsize *= length
    return True


# -- counts of the copies between devices, and the time that they take, measured on the devices


# Smaller copies are not timed: the two events would cost as much as the copy.
LEAST_NBYTES: Final = 1 << 20
# The most copies whose durations are waited for; beyond, the first ones count without a time.
_WAITING_AT_MOST: Final = 1024
# Each heartbeat carries all rows. In a large cluster, a worker sends to a thousand others.
_MOST_ROWS: Final = 256
_OTHERS: Final = "other workers"
# The earlier copies that each new one looks at, whether they are complete.
_LOOK_AT_MOST: Final = 4


class TimedCopy(NamedTuple):
    """A copy that a device was ordered to make, and the events around it."""

    source: Device
    nbytes: int
    begin: Event
    end: Event


class Thread(threading.local):
    """The :class:`~dask_devctx.transfer.move.Move` that runs on a thread."""

    move: Any = None


thread = Thread()


@contextmanager
def timed(device: Device, source: Device, nbytes: int, stream: int) -> Iterator[None]:
    """Time a copy that is ordered inside, in a stream of the current device.

    It is large, and of a move whose copies are counted.
    """
    move = thread.move
    if move is None or not move.counted or nbytes < LEAST_NBYTES:
        yield
        return
    begin = Event(device, timed=True).record(stream)
    yield
    move.timed.append(TimedCopy(source, nbytes, begin, Event(device, timed=True).record(stream)))


# The counts of a row; `dask_devctx.scheduler.rows.Transfer` says what each of them is.
_COUNTS: Final = ("nbytes", "copies", "saved", "measured_nbytes", "measured_s")


class _Ordered(NamedTuple):
    ends: tuple[str, str]
    nbytes: int
    begun: float
    parts: list[TimedCopy]


class TrafficCounts:
    """Counts transfers by source, destination and transport; threads may call all methods.

    An end is a device's UUID, or a worker's address.
    """

    def __init__(self) -> None:
        # Called, on any thread, with the ends, the bytes, the seconds and the transport; the number
        # of values; and the time of the start, and whether the device timed the copy.
        self.on_copy: Callable[..., object] = lambda *args, **more: None
        self._lock = threading.Lock()
        self._traffic: dict[tuple[str, str, str], dict[str, Any]] = {}  # by ends and transport
        self._ordered: deque[_Ordered] = deque()

    def saved(self, sources: Mapping[Device, int], device: Device) -> None:
        """Count an input that was there already, in place of a copy from some sources."""
        for source in sources:
            self._add(source.uuid, device.uuid, "peer", saved=1)

    def copied(
        self,
        sources: Mapping[Device, int],
        device: Device,
        begun: float,
        timed: Sequence[TimedCopy],
    ) -> None:
        """Count a copy of the sources' bytes, ordered at a time, and its parts that are timed."""
        for source, nbytes in sources.items():
            ends = source.uuid, device.uuid
            self._add(*ends, "peer", nbytes=nbytes, copies=1)
            parts = [part for part in timed if part.source is source]
            self._ordered.append(_Ordered(ends, nbytes, begun, parts))
        self.measure(_LOOK_AT_MOST)

    def arrived(
        self, source: str, destination: str, nbytes: int, seconds: float, values: int
    ) -> None:
        """Count values that came from another worker by CUDA IPC in some seconds."""
        measured = {"measured_nbytes": nbytes, "measured_s": seconds}
        self._add(source, destination, "ipc", nbytes=nbytes, copies=values, **measured)
        self.on_copy(source, destination, nbytes, seconds, "ipc", values)

    def sent(
        self, source: str, destination: str, transport: str, nbytes: int, reason: str | None
    ) -> None:
        """Count a value that dask sends; the last workers of a large cluster share a row."""
        known = (source, destination, transport) in self._traffic
        to = destination if known or len(self._traffic) < _MOST_ROWS else _OTHERS
        self._add(source, to, transport, nbytes=nbytes, copies=1)["reason"] = reason
        self.on_copy(source, destination, nbytes, 0.0, transport)

    def measure(self, at_most: int | None = None) -> None:
        """Note the durations of copies that are complete by now; does not wait."""
        for _ in range(len(self._ordered) if at_most is None else at_most):
            try:
                copy = self._ordered.popleft()
            except IndexError:  # there are no more
                return
            nbytes, took = 0, 0.0
            with suppress(DevctxError):  # the device failed, or a graph was captured
                if all(part.end.done() for part in copy.parts):
                    took = sum(part.end.seconds_since(part.begin) for part in copy.parts)
                    nbytes = sum(part.nbytes for part in copy.parts)
                elif len(self._ordered) < _WAITING_AT_MOST:
                    self._ordered.append(copy)
                    continue
            if took:
                self._add(*copy.ends, "peer", measured_nbytes=nbytes, measured_s=took)
            # The small parts of a value are not timed.
            what = copy.nbytes, took * copy.nbytes / nbytes if took else 0.0, "peer"
            self.on_copy(*copy.ends, *what, begun=copy.begun, timed=bool(took))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each source, destination and transport, as plain data."""
        self.measure()
        with self._lock:
            return [
                {"source": source, "destination": destination, "transport": transport, **row}
                for (source, destination, transport), row in self._traffic.items()
            ]

    def _add(
        self, source: str, destination: str, transport: str, **counts: float
    ) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        with self._lock:
            row = self._traffic.setdefault((source, destination, transport), row)
            for name, count in counts.items():
                row[name] += count
        return row
