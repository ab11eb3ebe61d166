"""The metrics of a worker's devices for Prometheus, on the worker's own page ``/metrics``.

dask serves ``prometheus_client``'s registry there. A process has one collector, for all its
workers, since the registry takes each name once. Without ``prometheus_client`` there is no page.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from dask_devctx.scheduler.rows import OF_A_DEVICE, OF_A_WORKER
from dask_devctx.worker.failures.monitor import Monitor
from dask_devctx.worker.metrics.record import Record

PREFIX: Final = "dask_devctx"


@dataclass(frozen=True, eq=False)
class _Source:
    """The counts of one worker."""

    record: Record
    monitor: Monitor
    transfers: Callable[[], list[dict[str, Any]]]


_sources: list[_Source] = []


@contextmanager
def exposed(
    record: Record,
    monitor: Monitor,
    transfers: Callable[[], list[dict[str, Any]]],
) -> Iterator[None]:
    """While it is open, the counts of a worker are on the page ``/metrics`` of its process.

    Parameters
    ----------
    record, monitor
        The worker's.
    transfers
        Returns a row for each source, destination and way.
    """
    if find_spec("prometheus_client") is None:
        yield
        return
    from prometheus_client import REGISTRY

    if not _sources:
        REGISTRY.register(_collector)
    source = _Source(record, monitor, transfers)
    _sources.append(source)
    try:
        yield
    finally:
        _sources.remove(source)
        if not _sources:
            REGISTRY.unregister(_collector)


class _Collector:
    def describe(self) -> list[Any]:
        """Return the families without values, by which the registry knows their names."""
        return list(_families().values())

    def collect(self) -> Iterator[Any]:
        """Yield the families; Prometheus asks for them."""
        families = _families()
        for name, sums in _sums().items():
            for labels, value in sums.items():
                families[name].add_metric(labels, value)
        yield from families.values()


_collector: Any = _Collector()


def _families() -> dict[str, Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    counters = {
        "tasks": ("Tasks that ended.", ("device", "outcome")),
        "busy_seconds": ("The sum of the seconds of tasks that ended.", ("device",)),
        "occupied_seconds": ("The seconds with one task or more.", ("device",)),
        "waiting_seconds": (
            "The seconds for which tasks waited: for a place, their inputs, or memory.",
            ("device", "for"),
        ),
        "transfer_bytes": ("The bytes that moved.", ("source", "target", "way")),
        "transfers": ("The values that moved.", ("source", "target", "way")),
        "failures": ("The failures of a device and of its memory.", ("device", "kind")),
        "spilled_bytes": ("The bytes of values that left the device.", ("device",)),
    }
    gauges = {
        "memory_bytes": ("The bytes of memory.", ("device", "kind")),
        "tasks_under_way": ("The tasks on the device now.", ("device", "state")),
        "utilization_ratio": ("The share of time in which it computes, by NVML.", ("device",)),
        "device_info": ("The device.", ("device", "device_id", "name")),
    }
    found: dict[str, Any] = {
        n: CounterMetricFamily(f"{PREFIX}_{n}", t, labels=k) for n, (t, k) in counters.items()
    }
    for n, (t, k) in gauges.items():
        found[n] = GaugeMetricFamily(f"{PREFIX}_{n}", t, labels=k)
    return found


def _sums() -> dict[str, Counter[tuple[str, ...]]]:
    """Return the values of each family by its labels, summed over the workers of this process."""
    sums: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    state: defaultdict[str, dict[tuple[str, ...], Any]] = defaultdict(dict)
    for source in _sources:
        for row in source.record.rows():
            uuid = row["uuid"]
            sums["tasks"][uuid, "memory"] += row["done"]
            sums["tasks"][uuid, "error"] += row["failed"]
            sums["busy_seconds"][(uuid,)] += row["busy_s"]
            sums["occupied_seconds"][(uuid,)] += row["occupied_s"]
            sums["spilled_bytes"][(uuid,)] += row["spilled_nbytes"]
            for why in ("place", "inputs", "memory"):
                sums["waiting_seconds"][uuid, why] += row[f"{why}_s"]
            sums["tasks_under_way"][uuid, "running"] += row["running"]
            sums["tasks_under_way"][uuid, "queued"] += row["queued"]
            for kind in (*OF_A_DEVICE, *OF_A_WORKER):
                nbytes = row[f"memory_{kind}"]
                if nbytes is None:
                    continue
                if kind in OF_A_WORKER:
                    sums["memory_bytes"][uuid, kind] += nbytes
                else:
                    state["memory_bytes"][uuid, kind] = nbytes
            if row["utilization"] is not None:
                state["utilization_ratio"][(uuid,)] = row["utilization"]
            state["device_info"][uuid, str(row["device_id"]), row["name"] or ""] = 1
        for row in source.transfers():
            ends = row["source"], row["destination"], row["way"]
            sums["transfer_bytes"][ends] += row["nbytes"]
            sums["transfers"][ends] += row["copies"]
        for kind, by_device in source.monitor.failures().items():
            for uuid, count in by_device.items():
                sums["failures"][uuid, kind] += count
    for name, values in state.items():
        sums[name].update(values)
    return sums
