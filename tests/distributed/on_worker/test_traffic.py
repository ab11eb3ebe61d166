"""The counts of transfers stay small however many workers there are."""

from __future__ import annotations

from dask_devctx import devices
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.peers.local import Traffic


def test_a_heartbeat_of_a_worker_that_sends_to_a_thousand(machine: SimulatedMachine) -> None:
    traffic, device = Traffic(), devices()[0]
    for turn in range(2):
        for n in range(1000):
            reason = f"reason {n} of turn {turn}"
            traffic.sent_by_dask({"x": {device: 10}}, f"tcp://host-{n}:1", reason)
    traffic.count("a", "b", "ipc", 7, 0.1)
    rows = {(row["destination"], row["way"]): row for row in traffic.rows()}
    assert len(rows) == 256 + 1 + 1
    assert rows["b", "ipc"]["nbytes"] == 7
    first, others = rows["tcp://host-0:1", "host"], rows["other workers", "host"]
    assert (first["copies"], first["reason"]) == (2, "reason 0 of turn 1")
    assert (others["copies"], others["reason"]) == (2 * (1000 - 256), "reason 999 of turn 1")
    assert sum(row["nbytes"] for row in traffic.rows()) == 2 * 1000 * 10 + 7
