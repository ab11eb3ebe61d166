"""What ``distributed.worker.preload`` names to give each worker the plugin as it starts."""

from distributed import Worker

from dask_devctx import DevicePlugin


async def dask_setup(worker: Worker) -> None:
    await worker.plugin_add(DevicePlugin(), name="devctx", catch_errors=False)
