"""Every argument of dask-cuda's cluster works, or is accepted with a reason, or is refused."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client

from dask_devctx import (
    Device,
    DeviceNotFoundError,
    DevicePlugin,
    LocalDeviceCluster,
    driver,
)
from dask_devctx.client.arguments import NOT_NEEDED, visible_device, without_dask_cudas
from dask_devctx.driver.simulated import SimulatedMachine
from tests.distributed.devices import uuid_here
from tests.distributed.on_client.test_cluster import QUIET, leftovers, ordinals

DOCS = Path(__file__).parents[3] / "docs"


def rows() -> dict[str, str]:
    """Return the arguments of LocalCUDACluster, and two that earlier versions had."""
    page = (DOCS / "from-dask-cuda.md").read_text("utf-8")
    return dict(re.findall(r"^\| `(\w+)` \| ((?:works|not needed): .*) \|$", page, re.M))


def test_the_page_shows_every_argument() -> None:
    assert len(rows()) == 27
    refuse = {"worker_class": None}
    assert without_dask_cudas(dict.fromkeys(rows()) | refuse, LocalDeviceCluster)
    not_needed = {name: text for name, text in rows().items() if text.startswith("not")}
    assert not_needed == {name: f"not needed: {reason}" for name, reason in NOT_NEEDED.items()}


@pytest.mark.parametrize("value", ["1,3", [1, 3], (1, "3"), "GPU"])
def test_visible_devices(value: Any) -> None:
    if value == "GPU":
        value = [Device(1).uuid, Device(3).uuid]
    with LocalDeviceCluster(CUDA_VISIBLE_DEVICES=value, **QUIET) as cluster:
        assert ordinals(cluster) == [[1], [3]]


def test_the_workers_processes_have_the_variable() -> None:
    def sees(dask_worker: Any = None) -> tuple[str | None, list[str]]:
        from dask_devctx import devices

        return os.environ.get("CUDA_VISIBLE_DEVICES"), [device.uuid for device in devices()]

    arguments: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": "3,1", "dashboard_address": ":0"}
    uuids = [Device(3).uuid, Device(1).uuid]
    with LocalDeviceCluster(**arguments) as cluster, Client(cluster) as client:
        assert [*client.run(sees).values()] == [("3,1", uuids)] * 2
        with dask.annotate(device=0):  # the first of those that the workers see
            assert client.submit(uuid_here, pure=False).result() == uuids[0]


def test_numbers_count_as_the_variable_does(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [Device(ordinal).uuid for ordinal in range(4)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with driver.use(SimulatedMachine(4).backend()):
        assert visible_device("3").uuid == uuids[3]
        assert visible_device(uuids[2]).uuid == uuids[2]
        for hidden in ("0", "1", "7", uuids[0]):
            with pytest.raises(DeviceNotFoundError, match=r"CUDA_VISIBLE_DEVICES.*2,3"):
                visible_device(hidden)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,9"}, DeviceNotFoundError, "no device '9'"),
        ({"worker_class": "dask_cuda.CUDAWorker"}, TypeError, "is a class .*got 'dask_cuda.CUDAW"),
        ({"CUDA_VISIBLE_DEVICES": "0", "devices": [0]}, TypeError, "got both"),
        ({"n_workers": "0,1"}, TypeError, "n_workers is a number.*CUDA_VISIBLE_DEVICES='0,1'"),
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker must be 1 or more, got 0"),
        ({"device": 0}, TypeError, r"no option 'device'. Did you mean devices\?"),
        ({"protocol": "ucx"}, ImportError, "protocol='ucx' needs the package d"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ValueError, "^CUDA_VISIBLE_DEVICES is empty, got ''"),
        ({"death_timeouts": 1}, TypeError, r"Did you mean death_timeout\?"),
        ({"rmm_pool_size": 0.5, "allocator": "cupy-async"}, TypeError, "either allocator or RMM"),
        (
            {"n_workers": 5},
            ValueError,
            "5 workers with 1 device each would need 5, and the cluster has 4. Start fewer w",
        ),
        ({"n_workers": 3, "devices": [0, 1]}, ValueError, r"need 3, and the cluster has 2\. Start"),
        ({"plugin": DevicePlugin(), "devices": [0]}, TypeError, "either a plugin"),
    ],
)
def test_what_is_refused_is_said_before_anything_starts(
    arguments: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", _found_without("distributed_ucxx", "ucp"))
    before = set(psutil.Process().children(recursive=True))
    start = time.monotonic()
    with pytest.raises(error, match=said):
        LocalDeviceCluster(**arguments)
    assert time.monotonic() - start < 1
    assert leftovers(before) == set()


def _found_without(*names: str) -> Any:
    from importlib.util import find_spec

    return lambda name, *rest: None if name in names else find_spec(name, *rest)


def test_an_argument_that_is_not_needed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    arguments: dict[str, Any] = dict.fromkeys(NOT_NEEDED, True)
    with caplog.at_level(logging.WARNING, "dask_devctx"):
        with LocalDeviceCluster(**arguments, **QUIET):
            pass
        told = [one.getMessage() for one in caplog.records if one.name.startswith("dask_devctx.cl")]
        caplog.clear()
        with LocalDeviceCluster(**dict.fromkeys(arguments, False), **QUIET):
            assert not caplog.records
    assert told == [f"{name} is not needed: {text}" for name, text in NOT_NEEDED.items()]
