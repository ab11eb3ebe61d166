"""Mistakes of a first day: each has a message with the reason and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from distributed import Client

from dask_devctx import LocalDeviceCluster, VisibleDevicesError, on_device, report, timeline
from tests.distributed.devices import here, started, submit_on
from tests.python import python


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import dask_devctx\ndask_devctx.LocalDeviceCluster(devices=[0, 1])")
    done = python(str(script), check=False)
    said = done.stderr.count('start the cluster under if __name__ == "__main__"')
    assert (done.returncode, said, len(done.stderr.splitlines()) < 80) == (1, 2, True)


# -- item i on device i


def test_the_remedy_for_an_item_on_each_device_works() -> None:
    with started() as client:
        names = {"client": client, "function": here, "items": "ab", "on_device": on_device}
        error = submit_on(client, [1, 0], here, 0, pure=False).exception()
        remedy = re.search(r"\[client\.submit\(.*\]$", str(error))
        assert remedy is not None, str(error)
        assert client.gather(eval(remedy[0], names)) == [1, 0]


# -- wrong arguments


def test_a_report_and_a_timeline_of_something_else(tmp_path) -> None:
    with (
        LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        submit_on(client, 1, here, 0, key="one-1").result()
        assert [(task.key, task.device_id) for task in report(cluster)] == [("one-1", 1)]
        path = str(tmp_path / "x.json")
        with pytest.raises(TypeError, match=r"timeline takes a client.*timeline\(Client\(cluster"):
            timeline(cluster, path)
        with pytest.raises(TypeError, match=r"report takes a client.*got 'inproc://"):
            report(cluster.scheduler_address)
        with pytest.raises(TypeError, match=r"path of a file.*got 3"):
            timeline(client, 3)
    for ask in (lambda: report(client), lambda: timeline(client, path)):
        with pytest.raises(ValueError, match=r"the client is closed.*Client\("):
            ask()


@pytest.mark.parametrize("value", ["7", ""])
def test_a_variable_that_hides_all_devices(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(VisibleDevicesError, match=f"^CUDA_VISIBLE_DEVICES is '{value}': "):
        LocalDeviceCluster(processes=False, dashboard_address=":0")
