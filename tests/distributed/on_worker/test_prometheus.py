"""A worker's page for Prometheus has the numbers of the report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Worker
from tornado.httpclient import AsyncHTTPClient

from dask_devctx import DevicePlugin, SimulatedArray, report
from tests.distributed.devices import on_cluster, with_plugin

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
        if family.name.startswith("dask_devctx_")
    ]
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, metric: str, /, **labels: str) -> float:
    return samples[f"dask_devctx_{metric}", frozenset(labels.items())]


def fail() -> None:
    raise ZeroDivisionError


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
    await client.register_plugin(DevicePlugin(devices=[0, 1]))
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
