"""A worker's page for Prometheus has the numbers of the report; ranges of NVTX have tasks' keys."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Worker
from tornado.httpclient import AsyncHTTPClient

from dask_devctx import DevicePlugin, SimulatedArray, report
from tests.distributed.devices import fail, of_worker, on_cluster, plugin_with, with_plugin

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scraped(worker: Worker) -> Samples:
    """Return the samples of this package by name and labels."""
    address = f"http://127.0.0.1:{worker.http_server.port}/metrics"
    text = (await AsyncHTTPClient().fetch(address)).body.decode()
    families = [
        family
        for family in parser.text_string_to_metric_families(text)
        if family.name.startswith("dask_devctx_") and "device_failures" not in family.name
    ]
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, metric: str, /, **labels: str) -> float:
    return samples[f"dask_devctx_{metric}", frozenset(labels.items())]


@with_plugin(devices=[0, 1, 2], tasks_per_device=2)
async def test_its_numbers_are_those_of_the_report(client: Any, worker: Worker) -> None:
    with dask.annotate(device=2):
        made = client.submit(SimulatedArray, (100, 100))
        await client.submit(fail).exception()
    with dask.annotate(device=0):
        await client.submit(lambda x: None, made)
    await client.gather(client.map(lambda n: n, range(20)))
    found, samples = await report(client), await scraped(worker)
    assert len(found.devices) == 3
    for device in found.devices:
        where = {"device": device.uuid}
        assert value(samples, "tasks_total", outcome="memory", **where) == device.done
        assert value(samples, "tasks_total", outcome="error", **where) == device.failed
        assert value(samples, "busy_seconds_total", **where) == device.busy_s
        for why in ("slot", "inputs", "memory"):
            waited = value(samples, "waiting_seconds_total", **where, **{"for": why})
            assert waited == getattr(device, f"{why}_s")
        assert value(samples, "memory_bytes", kind="free", **where) == device.memory_free
        assert value(samples, "memory_bytes", kind="total", **where) == device.memory_total
        assert value(samples, "memory_bytes", kind="copies", **where) == device.memory_copies
        info = {"device_id": str(device.device_id), "name": device.name, **where}
        assert value(samples, "device_info", **info) == 1
    (moved,) = found.transfers
    ends = {"source": moved.source, "destination": moved.destination, "transport": "peer"}
    assert value(samples, "transfer_bytes_total", **ends) == moved.nbytes == 80_000
    assert value(samples, "transfers_total", **ends) == 1
    assert sum(device.done for device in found.devices) == 22


@on_cluster(4, 4)
async def test_workers_of_one_process_share_a_page(client: Any, one: Any, two: Any) -> None:
    assert await scraped(one) == {}
    await client.register_plugin(DevicePlugin(devices=[0, 1], shared=True))
    assert of_worker(one) == of_worker(two) == [0, 1]
    await client.gather(client.map(lambda n: n, range(10)))
    samples, found = await scraped(two), await report(client)
    uuids = {device.uuid for device in found.devices}
    assert len(uuids) == 2
    done = [value(samples, "tasks_total", device=uuid, outcome="memory") for uuid in uuids]
    assert sum(done) == sum(device.done for device in found.devices) == 10
    total = value(samples, "memory_bytes", device=next(iter(uuids)), kind="total")
    assert total == 16 * 2**30
    await client.unregister_worker_plugin("devctx")
    assert await scraped(one) == await scraped(two) == {}


@with_plugin(devices=[0, 1])
async def test_the_dashboard_for_grafana_asks_for_metrics_that_there_are(client: Any) -> None:
    path = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"
    panels = json.loads(path.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    collected = prometheus_client.REGISTRY.collect()
    there = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in collected
        if family.name.startswith("dask_devctx_")
    }
    used = {name for expr in asked for name in re.findall(r"dask_devctx_\w+", expr)}
    assert used <= there
    # All but the names that the panels have in another form.
    assert there - used == {"dask_devctx_busy_seconds_total", "dask_devctx_transfers_total"}
    places = [panel["gridPos"] for panel in panels]
    assert len({(place["x"], place["y"]) for place in places}) == len(panels)


# -- ranges for Nsight Systems


def nvtx_noting(calls: list[tuple[str, Any]]) -> types.ModuleType:
    """Return a stand-in for the package, which tells only a profiler."""

    @contextmanager
    def annotate(message: str, domain: str) -> Iterator[None]:
        assert threading.current_thread().name.startswith("devctx-cuda:2")
        calls.append(("push", message))
        try:
            yield
        finally:
            calls.append(("pop", domain))

    nvtx: Any = types.ModuleType("nvtx")
    nvtx.__spec__ = types.SimpleNamespace()
    nvtx.annotate = annotate
    return nvtx  # type: ignore[no-any-return]


@on_cluster(4)
async def test_tasks_have_ranges(client: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        calls: list[tuple[str, Any]] = []
        patch.setitem(sys.modules, "nvtx", nvtx_noting(calls))
        await client.register_plugin(plugin_with(nvtx=True))
        with dask.annotate(device=2):
            await client.submit(sum, [1, 2], key="sum-1")
            await client.submit(fail, key="fail-1").exception()
    assert calls == [("push", "sum-1"), ("pop", "dask"), ("push", "fail-1"), ("pop", "dask")]
