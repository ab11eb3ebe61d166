"""Transfers of values on a device to another worker of this machine by CUDA IPC, with any comm.

dask's own messages name the place where the sender has staged the values. The receiver reads them
from there before it passes the answer on. So dask's "OK" means that the sender may use the staging
memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.worker import metric
from dask_devctx.errors import DriverError
from dask_devctx.worker.inputs.inputs import Inputs
from dask_devctx.worker.ipc import incoming
from dask_devctx.worker.ipc.connections import Connections
from dask_devctx.worker.ipc.traffic import Traffic
from dask_devctx.worker.ipc.ways import DasksWay, IpcWay

if TYPE_CHECKING:
    from dask_devctx.worker.memory.manager import DeviceMemory

__all__ = ["PeerTransfers"]

_LOOK_EVERY_MS: Final = 5_000


class PeerTransfers:
    """While it is open, a worker sends and receives values on its devices without the host.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    devices
        Its devices; without devices, dask sends all values.
    inputs
        Knows the work that makes each value; None if no work is known.
    staging
        How much of each device's memory may be used for staging: a fraction, or bytes.
    limits
        The limit of each device's memory; a fraction is one of this limit.
    use
        False for never, True for always, or ``"auto"`` for always except with a UCX comm, which
        makes such transfers itself.
    make_room
        Called with a device that has no memory left.
    on_failure
        Called with a device that failed, and the driver's error.
    memory
        Returns the manager of the device memory; None if there is none.

    Attributes
    ----------
    metric
        The name of the counts that the worker's heartbeat carries.
    way
        The way that the values take.
    """

    metric: Final = "devctx-ipc"

    def __init__(
        self,
        worker: Worker,
        devices: Sequence[Device],
        inputs: Inputs | None,
        *,
        staging: float,
        limits: Mapping[Device, int] = MappingProxyType({}),
        use: object = "auto",
        make_room: Callable[[Device], object] = lambda device: None,
        on_failure: Callable[[Device, DriverError], object] = lambda device, error: None,
        has_failed: Callable[[], bool] = lambda: False,
        memory: Callable[[], DeviceMemory | None] = lambda: None,
    ) -> None:
        incoming.register()
        by_ucx = worker.address.partition("://")[0].startswith("ucx")
        # A UCX comm sends the values from device to device.
        self.traffic = Traffic("ucx" if by_ucx else "host")
        self.way: IpcWay | DasksWay = DasksWay(devices, inputs, self.traffic)
        if devices and use is not False and not (use == "auto" and by_ucx):
            self.way = IpcWay(
                worker,
                devices,
                inputs,
                staging=staging,
                limits=limits,
                make_room=make_room,
                on_failure=on_failure,
                memory=memory,
                has_failed=has_failed,
                traffic=self.traffic,
            )
        with ExitStack() as steps:
            connections = Connections(
                worker,
                self.way,
                has_failed=has_failed,
                takes_host_forms=lambda: memory() is not None,
            )
            steps.callback(self.way.close, connections)
            steps.callback(connections.close)
            rows = metric(worker, self.metric, lambda worker: self.traffic.rows())
            steps.enter_context(rows)
            looking = PeriodicCallback(self.way.look, _LOOK_EVERY_MS)
            steps.callback(looking.stop)
            looking.start()
            self._steps = steps.pop_all()

    def close(self) -> None:
        """Leave transfers to dask from now on."""
        self._steps.close()

    @property
    def in_use(self) -> int:
        """The bytes of staging memory that hold values on their way."""
        return self.way.in_use

    def staging_nbytes(self, device: Device) -> int:
        """Return the bytes of a device that are allocated as staging memory."""
        staging = self.way.stagings.get(device)
        return 0 if staging is None else staging.nbytes

    def free_staging(self, device: Device) -> int:
        """Free the staging memory of a device that ran out of memory; return the freed bytes."""
        return self.way.free_staging(device)
