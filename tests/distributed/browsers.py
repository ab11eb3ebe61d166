"""A real browser without a screen, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def missing() -> str | None:
    """Return the reason why there is no browser here, or None."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        return "no browser: apt-get install chromium chromium-driver"
    return None


@contextmanager
def browser(width: int, height: int) -> Iterator[Any]:
    """Open a browser with a window of some size, and close it at the end."""
    pytest.importorskip("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(str(shutil.which("chromedriver")))
    opened = webdriver.Chrome(options=options, service=service)
    try:
        yield opened
    finally:
        opened.quit()


def errors(opened: Any) -> list[str]:
    """Return the errors in the browser's console since the last call."""
    return [line["message"] for line in opened.get_log("browser") if line["level"] == "SEVERE"]
