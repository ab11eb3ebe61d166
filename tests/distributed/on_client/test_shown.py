"""Tables and logs of a cluster: its devices, and little where it closes in mid-work."""

from __future__ import annotations

import logging
import re

import pytest

from dask_devctx import Device
from tests.distributed.devices import started
from tests.python import python


def test_a_worker_says_which_devices_it_took(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="distributed.worker"),
        started(devices=[3, 1], n_workers=1, silence_logs=False) as client,
    ):
        (said,) = [text for text in caplog.messages if text.startswith("This worker uses")]
        uuids = Device(3).uuid, Device(1).uuid
        named = [f"cuda:{n} ({uuid}) Simulated GPU" for n, uuid in zip((3, 1), uuids, strict=True)]
        assert said == f"This worker uses 2 devices: {', '.join(named)}"
        logs = client.get_worker_logs()
    assert any(said in text for lines in logs.values() for _, text in lines)


_WARNS = """
import logging
from distributed import Client
from dask_devctx import LocalDeviceCluster

def warn():
    logging.getLogger("dask_devctx.worker").warning("look here")

if __name__ == "__main__":
    with LocalDeviceCluster(
        n_workers=1, processes=False, dashboard_address=":0"
    ) as cluster, Client(cluster) as client:
        client.submit(warn).result()
        print(client.get_worker_logs())
"""


def test_a_workers_warnings_are_shown_and_kept() -> None:
    """Python shows a warning on stderr only as long as its logger has no handler."""
    done = python("-c", _WARNS)
    assert "look here" in done.stdout
    (shown,) = [line for line in done.stderr.splitlines() if "look here" in line]
    assert re.fullmatch(r"[-0-9:, ]{23} - dask_devctx\.worker - WARNING - look here", shown)


# 200 tasks on the four places of two workers; the cluster closes while the first of them run.
_SCRIPT = """
import sys, time
from distributed import Client, Event
from dask_devctx import LocalDeviceCluster

def work(n, begun):
    begun.set()
    time.sleep(0.5)

if __name__ == "__main__":
    how, where = sys.argv[1:]
    cluster = LocalDeviceCluster(
        n_workers=2, devices_per_worker=2, processes=where == "processes", dashboard_address=":0"
    )
    client = Client(cluster)
    begun = Event("begun")
    futures = client.map(work, range(200), begun=begun)
    assert begun.wait(20)
    time.sleep(0.2)
    print("---", file=sys.stderr, flush=True)
    if how == "close":
        client.close()
        cluster.close()
"""


# A line for each task that ran, and one for each worker whose results are lost.
MOST = 6
# Lines that a slow machine adds: dask's nannies write the first, with and without devices. dask's
# scheduler writes the second for a task that did not run, if the client leaves before the workers.
SLOW = ("still alive after", "Aborting reschedule")


@pytest.mark.parametrize(
    ("how", "where"), [("close", "threads"), ("close", "processes"), ("end", "threads")]
)
def test_it_says_a_line_for_each_task_that_ran(how: str, where: str) -> None:
    done = python("-c", _SCRIPT, how, where)
    lines = done.stderr.partition("---")[2].splitlines()[1:]
    lines = [line for line in lines if not any(text in line for text in SLOW)]
    assert len(lines) <= MOST, lines
    assert not [line for line in lines if "Traceback" in line]
