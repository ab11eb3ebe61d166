"""NVTX ranges have the keys of tasks, on the threads of the devices."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import pytest

from dask_devctx import LocalDeviceCluster
from dask_devctx.errors import MissingPackageError
from tests.distributed.devices import on_cluster, plugin_with


class Nvtx(types.ModuleType):
    """Stands in for the package, which tells only a profiler."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        self.calls: list[tuple[str, Any, str]] = []

    def _note(self, what: str, about: Any) -> None:
        self.calls.append((what, about, threading.current_thread().name))

    @contextmanager
    def annotate(self, message: str, domain: str) -> Iterator[None]:
        assert domain == "dask"
        self._note("push", message)
        try:
            yield
        finally:
            self._note("pop", None)

    def start_range(self, message: str, domain: str) -> int:
        assert domain == "dask"
        self._note("start", message)
        return len(self.calls)

    def end_range(self, number: int) -> None:
        self._note("end", number)


def fail() -> None:
    raise ZeroDivisionError


async def awaits() -> int:
    await asyncio.sleep(0.01)
    return 1


@on_cluster(4)
async def test_tasks_have_ranges(client: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        nvtx = Nvtx()
        patch.setitem(sys.modules, "nvtx", nvtx)
        await client.register_plugin(plugin_with(nvtx=True))
        with dask.annotate(device=2):
            await client.submit(sum, [1, 2], key="sum-1")
            await client.submit(fail, key="fail-1").exception()
            await client.submit(awaits, key="awaits-1")
    calls = [call[:2] for call in nvtx.calls]
    assert calls[:4] == [("push", "sum-1"), ("pop", None), ("push", "fail-1"), ("pop", None)]
    assert calls[4:] == [("start", "awaits-1"), ("end", 5)]
    assert all(thread.startswith("devctx-cuda:2") for _, _, thread in nvtx.calls[:4])


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    changed = dask.config.set({"devctx.nvtx": True})
    with changed, pytest.raises(MissingPackageError, match="pip install nvtx"):
        LocalDeviceCluster(dashboard_address=":0")
