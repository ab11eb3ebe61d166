"""A cluster that is closed in mid-work says what a plain cluster says, and no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

# 200 tasks on the four places of two workers; the cluster closes while the first of them run.
_SCRIPT = """
import sys, time
from distributed import Client, Event, LocalCluster
from dask_devctx import LocalDeviceCluster

def work(n, begun):
    begun.set()
    time.sleep(0.5)

def close_in_mid_work(kind, how, **options):
    cluster = kind(n_workers=2, dashboard_address=":0", **options)
    client = Client(cluster)
    begun = Event("begun")
    futures = client.map(work, range(200), begun=begun)
    assert begun.wait(20)
    time.sleep(0.2)
    print("---", kind.__name__, file=sys.stderr, flush=True)
    if how == "close":
        client.close()
        cluster.close()

if __name__ == "__main__":
    how, where, *plain = sys.argv[1:]
    processes = where == "processes"
    if plain:
        close_in_mid_work(LocalCluster, how, processes=processes, threads_per_worker=2)
    close_in_mid_work(LocalDeviceCluster, how, processes=processes, devices_per_worker=2)
"""


# A line for each task that ran, and one for each worker whose results are lost.
MOST = 6
# Lines that a slow machine adds: dask's nannies write the first, with and without devices. dask's
# scheduler writes the second for a task that did not run, if the client leaves before the workers.
SLOW = ("still alive after", "Aborting reschedule")


def said(*how: str) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *how], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    parts = [part.splitlines() for part in done.stderr.split("--- ")[1:]]
    return {
        kind.strip(): [one for one in lines if not any(text in one for text in SLOW)]
        for kind, *lines in parts
    }


def test_it_says_no_more_than_a_plain_cluster() -> None:
    lines = said("close", "threads", "beside a plain one")
    assert len(lines["LocalDeviceCluster"]) <= max(len(lines["LocalCluster"]), MOST), lines


@pytest.mark.parametrize(("how", "where"), [("close", "processes"), ("end", "threads")])
def test_it_says_a_line_for_each_task_that_ran(how: str, where: str) -> None:
    lines = said(how, where)["LocalDeviceCluster"]
    assert len(lines) <= MOST, lines
    assert not [line for line in lines if "Traceback" in line]
