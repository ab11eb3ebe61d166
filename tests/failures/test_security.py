"""The plugin adds no port, and no way in but messages about devices, their memory and tasks."""

from __future__ import annotations

import psutil
from distributed import Client, LocalCluster

from dask_devctx import DevicePlugin
from dask_devctx.scheduler.messages import (
    ANNOUNCE,
    CLAIM,
    HISTORY,
    KEEP,
    REFUSE,
    SHARE,
    WITHDRAW,
)
from dask_devctx.scheduler.suspects import FAILED


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_no_port_is_added_and_the_servers_are_only_told_of_devices_and_memory() -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        (worker,) = cluster.workers.values()
        servers = [worker, cluster.scheduler]
        ports = listening()
        before = [(set(s.handlers), set(s.stream_handlers)) for s in servers]
        (on_worker, its_streams), (on_scheduler, streams) = before
        told = (on_scheduler | {ANNOUNCE, REFUSE, WITHDRAW, FAILED, CLAIM, KEEP}, streams)
        added = {f"devctx_ipc_{op}" for op in ("close", "hello")}
        added |= {SHARE, HISTORY}
        client.register_plugin(DevicePlugin())
        assert client.submit(sum, [1, 2]).result() == 3
        assert listening() == ports
        assert [(set(s.handlers), set(s.stream_handlers)) for s in servers] == [
            (on_worker | added, its_streams),
            told,
        ]
        client.unregister_worker_plugin("devctx")
        assert [(set(s.handlers), set(s.stream_handlers)) for s in servers] == [
            before[0],
            told,
        ]
