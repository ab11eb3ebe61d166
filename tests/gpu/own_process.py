"""Scenarios that have a process of their own, on real GPUs: functions of the tests' modules."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from distributed import Client

from dask_devctx import LocalDeviceCluster
from tests.python import python


def answer_of(scenario: Callable[..., dict[str, Any]], *arguments: object, **variables: str) -> Any:
    """Return the answer of a function of a module of these tests, called in a process."""
    called = scenario.__module__.rpartition(".")[2], scenario.__name__, arguments
    shown = output_of("tests.gpu.own_process", json.dumps(called), **variables)
    lines = [line for line in shown.splitlines() if line.startswith("{")]
    assert lines, shown
    print(lines[-1])
    return json.loads(lines[-1])


def output_of(module: str, *arguments: str, **variables: str) -> str:
    """Run a module of the tests, which ends well; return what it prints."""
    with tempfile.TemporaryDirectory() as locks:  # other tests use the GPUs at the same time
        own = {"DASK_DEVCTX__SIMULATED_DEVICES": None, "DASK_DEVCTX__LOCK_DIRECTORY": locks}
        return python("-m", module, *arguments, env={**own, **variables}, timeout=300).stdout


@contextmanager
def connected(**options: Any) -> Iterator[Client]:
    """The client of a new cluster of processes."""
    with (
        LocalDeviceCluster(dashboard_address=":0", **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


def first_device(dask_worker: Any) -> int | None:
    devices = dask_worker.plugins["devctx"].worker_devices
    return devices[0].device_id if devices else None


if __name__ == "__main__":
    # Workers import the module by its name.
    module, name, arguments = json.loads(sys.argv[1])
    print(json.dumps(getattr(import_module(f"tests.gpu.{module}"), name)(*arguments)), flush=True)
