"""A cluster that is closed in mid-work says little, as a plain cluster does."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, how, where], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.partition("---")[2].splitlines()[1:]
    lines = [line for line in lines if not any(text in line for text in SLOW)]
    assert len(lines) <= MOST, lines
    assert not [line for line in lines if "Traceback" in line]
