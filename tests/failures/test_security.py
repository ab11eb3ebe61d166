"""The plugin adds no port, and no way in but what the scheduler is told about devices."""

from __future__ import annotations

import psutil
from distributed import Client, LocalCluster

from dask_devctx import DevicePlugin
from dask_devctx.scheduler.announcements import ANNOUNCE, REFUSE, WITHDRAW


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_no_port_is_added_and_the_scheduler_is_only_told_of_devices() -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        (worker,) = cluster.workers.values()
        servers = [worker, cluster.scheduler]
        ports = listening()
        before = [(set(s.handlers), set(s.stream_handlers)) for s in servers]
        (on_scheduler, streams) = before[1]
        told = (on_scheduler | {ANNOUNCE, REFUSE, WITHDRAW}, streams)
        client.register_plugin(DevicePlugin())
        assert client.submit(sum, [1, 2]).result() == 3
        assert listening() == ports
        assert [(set(s.handlers), set(s.stream_handlers)) for s in servers] == [
            before[0],
            told,
        ]
        client.unregister_worker_plugin("devctx")
        assert [(set(s.handlers), set(s.stream_handlers)) for s in servers] == [
            before[0],
            told,
        ]
