"""An array that is larger than the devices' memory: what is not in use waits in host memory.

Run it as ``python examples/larger_than_memory.py``. All chunks are computed and kept, and then used
again. Each device holds values up to a limit; the least recently used ones go to host memory, and
come back ahead of the tasks that need them. CuPy computes on GPUs, `SimulatedArray` on simulated
devices.

Without a GPU, set ``DASK_DEVCTX__SIMULATED_DEVICES=2``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from distributed import Client, wait

from dask_devctx import LocalDeviceCluster, driver, report


def make_chunk(number: int, nbytes: int) -> Any:
    """Return a chunk on the task's device, filled with its number."""
    if driver.backend().simulated:
        from dask_devctx import SimulatedArray

        return SimulatedArray((nbytes // 8,)) + float(number)
    import cupy

    return cupy.full(nbytes // 8, float(number))


def total(chunk: Any) -> float:
    """Return the sum of a chunk's elements."""
    return float(chunk.sum().get())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=8, help="MiB of each device")
    parser.add_argument("--chunks", type=int, default=32, help="of 1 MiB each")
    options = parser.parse_args()
    nbytes = 2**20

    with (
        LocalDeviceCluster(
            dashboard_address=":0", device_memory_limit=options.limit * nbytes
        ) as cluster,
        Client(cluster) as client,
    ):
        chunks = client.map(make_chunk, range(options.chunks), nbytes=nbytes)
        wait(chunks)  # all of them are kept
        totals = client.gather(client.map(total, chunks))
        done = report(client)

    print(done)
    room = options.limit * len(done.devices)
    spilled = sum(device.spilled_nbytes for device in done.devices) / nbytes
    print(
        f"{options.chunks} MiB of chunks, room for {room} MiB; {spilled:.0f} MiB went to the host"
    )
    right = np.allclose(totals, np.arange(options.chunks) * (nbytes // 8))
    print("sums are right" if right else "sums are WRONG")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
