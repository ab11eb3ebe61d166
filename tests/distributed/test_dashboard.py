"""The page of the devices comes and goes with the plugin, and shows the workers' history."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from distributed.utils_test import async_poll_for
from tornado.httpclient import AsyncHTTPClient, HTTPResponse

from dask_devctx import DevicePlugin
from tests.distributed.devices import here, on_cluster
from tests.python import ROOT

pytest.importorskip("bokeh")

PAGES = ("devices", *(f"individual-device-{p}" for p in ("timeline", "memory", "utilization")))
SHOWN = {"dashboard": True, "dashboard_address": "127.0.0.1:0"}

with_dashboard = on_cluster(2, scheduler_kwargs=SHOWN)


async def page(scheduler: Any, path: str, **options: Any) -> HTTPResponse:
    url = f"http://127.0.0.1:{scheduler.http_server.port}/{path}"
    return await AsyncHTTPClient().fetch(url, raise_error=False, **options)


async def menu(scheduler: Any) -> str:
    return str((await page(scheduler, "status")).body)


def state(scheduler: Any) -> Any:
    from distributed.dashboard.scheduler import template_variables

    variables = template_variables(scheduler)
    pages, plots = list(variables["pages"]), list(variables["plots"])
    return list(scheduler.http_application.applications), pages, plots


@with_dashboard
async def test_it_comes_with_the_first_worker_and_goes_with_the_plugin(
    client: Any, scheduler: Any
) -> None:
    before = state(scheduler)
    assert (await page(scheduler, "devices")).code == 404
    await client.register_plugin(DevicePlugin())
    for path in PAGES:
        shown = await page(scheduler, f"{path}?theme=dark")
        assert (shown.code, b"color-scheme: dark" in shown.body) == (200, True), path
    assert 'href="devices"' in await menu(scheduler)
    assert "individual-device-transfers" in await menu(scheduler)
    await client.unregister_worker_plugin("devctx")
    await async_poll_for(lambda: state(scheduler) == before, timeout=10)
    assert (await page(scheduler, "devices")).code == 404
    assert 'href="devices"' not in await menu(scheduler)
    assert (await page(scheduler, "status")).code == 200


@with_dashboard
async def test_other_programs_find_each_plot(client: Any, scheduler: Any) -> None:
    theirs = json.loads((await page(scheduler, "individual-plots.json")).body)
    await client.register_plugin(DevicePlugin())
    plots = json.loads((await page(scheduler, "individual-plots.json")).body)
    assert plots.items() >= theirs.items()
    paths = {path for name, path in plots.items() if "Device" in name}
    names = [path.removeprefix("/individual-device-") for path in paths]
    assert {"glance", "timeline", "memory", "utilization", "transfers", "failures"} <= {*names}
    whole = (await page(scheduler, "devices")).body.decode()
    missing = [name for name in names if f"#devices-{name} {{ grid-area: {name};" not in whole]
    assert missing == [], "no rule with their grid-area in templates/devices.html"
    _, narrow, wide = whole.split("grid-template-areas:")
    missing = [n for grid in (narrow, wide) for n in names if n not in grid.split(";")[0]]
    assert missing == [], "not in both of the grid-template-areas of templates/devices.html"
    guide = (ROOT / "docs" / "monitoring.md").read_text()
    assert [path for path in paths if f"`{path}`" not in guide] == [], "not in monitoring.md"


@on_cluster(2, scheduler_kwargs={**SHOWN, "http_prefix": "/proxied"})
async def test_behind_a_prefix(client: Any, scheduler: Any) -> None:
    await client.register_plugin(DevicePlugin())
    assert (await page(scheduler, "proxied/devices")).code == 200
    assert (await page(scheduler, "devices")).code == 404


@on_cluster(2, 2, scheduler_kwargs=SHOWN)  # dask tells of each worker that leaves afterwards
async def test_it_ends_with_the_scheduler(
    client: Any, scheduler: Any, one: Any, two: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await client.register_plugin(DevicePlugin(devices_per_worker=2))
    pages = scheduler.http_application.applications[0]
    with caplog.at_level(logging.ERROR):
        await scheduler.close()
    assert pages not in scheduler.http_application.applications
    assert "send_all" not in vars(scheduler)
    assert not [record for record in caplog.records if "Plugin call failed" in record.message]


@on_cluster(2, scheduler_kwargs={"dashboard": False})
async def test_without_a_dashboard_one_line_says_so(
    client: Any, scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "dask_devctx.scheduler.dashboard"):
        await client.register_plugin(DevicePlugin())
        await client.register_plugin(DevicePlugin(), name="devctx")
        assert await client.submit(here) is not None
    lines = [r.getMessage() for r in caplog.records if "scheduler.dashboard" in r.name]
    assert lines == ["The scheduler shows no dashboard, so that there is no page /devices"]
    assert (await page(scheduler, "devices")).code == 404


@with_dashboard
async def test_without_a_name_of_dasks_dashboard_there_is_no_page(
    client: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "dask_devctx.scheduler.dashboard.page", raising=False)
    monkeypatch.setitem(sys.modules, "dask_devctx.dask_internals.dashboard", None)
    await client.register_plugin(DevicePlugin())
    assert "The dashboard gets no page /devices: import of dask_devctx.dask_" in caplog.text
    assert (await page(scheduler, "devices")).code == 404
    assert await client.submit(here, key="runs") is not None
