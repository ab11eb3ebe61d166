"""The metrics of a worker's devices for Prometheus, on the worker's own page ``/metrics``.

dask serves ``prometheus_client``'s registry there. A process has one collector, for all its
workers, since the registry takes each name once. Without ``prometheus_client`` there is no page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

from dask_devctx.scheduler.rows import OF_A_DEVICE, OF_A_WORKER, memory_field
from dask_devctx.worker.metrics.record import Record

PREFIX: Final = "dask_devctx"
# The text and the labels of each family.
_COUNTERS: Final = {
    "tasks": ("Tasks that ended.", ("device", "outcome")),
    "busy_seconds": ("The sum of the seconds of tasks that ended.", ("device",)),
    "occupied_seconds": ("The seconds with one task or more.", ("device",)),
    "waiting_seconds": (
        "The seconds for which tasks waited: for a slot, their inputs, or memory.",
        ("device", "for"),
    ),
    "transfer_bytes": ("The bytes that moved.", ("source", "destination", "transport")),
    "transfers": ("The values that moved.", ("source", "destination", "transport")),
    "failures": ("The failures of its memory.", ("device", "kind")),
    "spilled_bytes": ("The bytes of values that left the device.", ("device",)),
}
_GAUGES: Final = {
    "memory_bytes": ("The bytes of memory.", ("device", "kind")),
    "tasks_under_way": ("The tasks on the device now.", ("device", "state")),
    "utilization_ratio": ("The share of time in which it computes, by NVML.", ("device",)),
    "device_info": ("The device.", ("device", "device_id", "name")),
}

_Transfers = Callable[[], list[dict[str, Any]]]
# A worker's counts: its record, and a row for each source, destination and transport.
_sources: list[tuple[Record, _Transfers]] = []


@contextmanager
def exposed(record: Record, transfers: _Transfers) -> Iterator[None]:
    """While it is open, the counts of a worker are on the page ``/metrics`` of its process."""
    if find_spec("prometheus_client") is None:
        yield
        return
    from prometheus_client import REGISTRY

    if not _sources:
        REGISTRY.register(_collector)
    source = record, transfers
    _sources.append(source)
    try:
        yield
    finally:
        _sources.remove(source)
        if not _sources:
            REGISTRY.unregister(_collector)


class _Collector:
    def collect(self) -> Iterator[Any]:
        """Yield the families, with sums over the workers of this process; Prometheus asks."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        # The registry asks first while there is no worker, and learns their names.
        families = {
            name: kind(f"{PREFIX}_{name}", text, labels=labels)
            for kind, some in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES))
            for name, (text, labels) in some.items()
        }
        sums = Counter[tuple[str, tuple[str, ...]]]()
        for source in _sources:
            for name, labels, value in _values(*source):
                # Facts of the whole device are not summed.
                if name in ("utilization_ratio", "device_info") or labels[-1] in OF_A_DEVICE:
                    sums[name, labels] = value
                else:
                    sums[name, labels] += value
        for (name, labels), value in sums.items():
            families[name].add_metric(labels, value)
        yield from families.values()


_collector: Any = _Collector()


def _values(record: Record, transfers: _Transfers) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield a worker's values: the family, the labels and the number of each."""
    for row in record.rows():
        uuid = row["uuid"]
        yield "tasks", (uuid, "memory"), row["done"]
        yield "tasks", (uuid, "error"), row["failed"]
        yield "busy_seconds", (uuid,), row["busy_s"]
        yield "occupied_seconds", (uuid,), row["occupied_s"]
        yield "spilled_bytes", (uuid,), row["spilled_nbytes"]
        yield "failures", (uuid, "out-of-memory"), row["out_of_memory"]
        for why in ("slot", "inputs", "memory"):
            yield "waiting_seconds", (uuid, why), row[f"{why}_s"]
        for state in ("running", "queued"):
            yield "tasks_under_way", (uuid, state), row[state]
        for kind in (*OF_A_DEVICE, *OF_A_WORKER):
            if (nbytes := row[memory_field(kind)]) is not None:
                yield "memory_bytes", (uuid, kind), nbytes
        if row["utilization"] is not None:
            yield "utilization_ratio", (uuid,), row["utilization"]
        yield "device_info", (uuid, str(row["device_id"]), row["name"] or ""), 1
    for row in transfers():
        ends = row["source"], row["destination"], row["transport"]
        yield "transfer_bytes", ends, row["nbytes"]
        yield "transfers", ends, row["copies"]
