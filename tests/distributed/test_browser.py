"""The page of the devices in a real browser, while a job runs."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, wait

from dask_devctx.simulated_array import SimulatedArray
from tests.distributed.devices import started, submit_on


@contextmanager
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(str(shutil.which("chromedriver")))
    opened = webdriver.Chrome(options=options, service=service)
    try:
        yield opened
    finally:
        opened.quit()


pytest.importorskip("bokeh")
pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="no browser: apt-get install chromium chromium-driver",
)

# Returns the rows of a plot's renderer that has all of some columns.
ROWS = """
    const [plot, ...columns] = arguments
    const layout = window.Bokeh?.documents[0]?.get_model_by_name(plot)
    for (const renderer of layout?.children[0].renderers ?? []) {
        const data = renderer.data_source.data
        if (columns.every((column) => column in data))
            return columns.map((column) => Array.from(data[column]))
    }
"""
LAYOUT = """
    const cells = document.querySelectorAll("#devices > div:not(#devices-range)")
    const boxes = [...cells].map((cell) => {
        const {left, top, width, height} = cell.getBoundingClientRect()
        const shown = cell.firstElementChild.getBoundingClientRect()
        return {left, top, width, height, shown: [shown.width, shown.height]}
    })
    return {boxes, wide: document.documentElement.scrollWidth - innerWidth}
"""


@pytest.fixture
def client() -> Iterator[Client]:
    with started() as client:
        yield client


def make(megabytes: int) -> SimulatedArray:
    time.sleep(0.1)
    return SimulatedArray((megabytes << 20,), "u1")


def add(one: SimulatedArray, other: SimulatedArray) -> SimulatedArray:
    time.sleep(0.1)
    return one + other


def fails() -> None:
    raise ValueError("no <b>rows</b> in this file")


def run_job(client: Client, name: str) -> list[Any]:
    values = []
    for device in range(4):
        values.append(submit_on(client, device, make, 2, key=f"make-{name}-{device}"))
    sums = []
    for device in range(4):
        given = values[device], values[(device + 1) % 4]
        sums.append(submit_on(client, device, add, *given, key=f"add-{name}-{device}"))
    wait([*values, *sums])
    return values + sums


def until(read: Callable[[], Any], accept: Callable[[Any], Any], timeout: float = 20) -> Any:
    deadline = time.monotonic() + timeout
    while not accept(answer := read()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)
    return answer


def test_the_page_of_a_job_that_runs(client: Client, tmp_path: Path) -> None:
    url = client.dashboard_link.replace("/status", "/devices")
    with browser() as page:
        page.get(url)
        values = run_job(client, "first")
        failed = client.submit(fails, key="fails-1")
        wait(failed)

        def rows(plot: str, *columns: str) -> list[tuple[Any, ...]]:
            found = page.execute_script(ROWS, f"device_{plot}", *columns)
            return [] if found is None else list(zip(*found, strict=True))

        # A lane for each device, with a bar for each task.
        def bars() -> dict[str, float]:
            """The lower sides of tasks' bars, by key."""
            found = rows("timeline", "about", "bottom")
            return {re.findall("key</td><td>(.+?)<", text)[0]: low for text, low in found}

        keys = {*(v.key for v in values), "fails-1"}
        at = until(bars, lambda shown: shown.keys() >= keys)
        for device in range(4):
            assert 3 - device < at[f"make-first-{device}"] < 4 - device
        for left, right in rows("timeline", "left", "right"):
            assert 0 <= right - left < 10_000
        # More tasks, more bars; of the numbers in other plots, see on_scheduler/test_plots.py.
        values += run_job(client, "second")
        keys |= {value.key for value in values}
        until(bars, lambda shown: shown.keys() == keys)

        # The failure, as text and not as HTML.
        table = page.execute_script(
            "return Bokeh.documents[0].get_model_by_name('device_failures').text"
        )
        assert "fails-1" in table
        assert "no &lt;b&gt;rows&lt;/b&gt; in this file" in table
        assert {("failed",), ("make-first",), ("add-first",)} < {*rows("timeline", "kind")}

        # Another range of time, also on the page of a plot alone, which has dask's menu.
        span = """
            const {x_range} = Bokeh.documents[0].get_model_by_name("device_timeline").children[0]
            return Math.round((x_range.end - x_range.start) / 1000)
        """
        page.set_window_size(1000, 700)
        for path in ("individual-device-timeline", "devices"):
            page.get(url.replace("devices", path))
            until(lambda: page.execute_script(f"try {{{span}}} catch {{}}"), [30].__contains__)
            page.execute_script("Bokeh.documents[0].get_model_by_name('device_range').active = 1")
            until(lambda: page.execute_script(span), [120].__contains__)
            assert page.find_element("css selector", "a[href='devices']").text == "Devices"

        for size in ((1000, 700), (1400, 900), (3840, 2160)):
            page.set_window_size(*size)
            layout = until(lambda: page.execute_script(LAYOUT), lambda layout: layout["wide"] <= 0)
            page.save_screenshot(str(tmp_path / f"{size[0]}.png"))
            assert len(layout["boxes"]) == 6, "the number of plots and tables on the page"
            for box in layout["boxes"]:
                assert box["left"] >= 0
                assert box["left"] + box["width"] <= size[0]
                assert box["width"] >= 470
                assert box["height"] >= 120
                assert box["shown"][0] <= box["width"] + 1
                assert box["shown"][1] <= box["height"] + 1
        # A browser that prefers dark pages gets one, also of a plot alone.
        dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        look = "return [location.search, getComputedStyle(document.body).backgroundColor]"
        for path in ("devices", "individual-device-timeline"):
            page.get(url.replace("devices", path))
            until(lambda: page.execute_script(look), ["?theme=dark", "rgb(21, 25, 28)"].__eq__)
        assert [one for one in page.get_log("browser") if one["level"] == "SEVERE"] == []
