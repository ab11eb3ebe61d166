"""An array that is larger than the devices' memory: blocks that are not in use wait on the host.

Run it as ``python examples/larger_than_memory.py --out DIR``. All blocks are computed and kept, and
then used again with their transposes. Each device holds values up to a limit; the least recently
used ones go to host memory, and come back ahead of the tasks that need them. CuPy computes on GPUs,
`SimulatedArray` on simulated devices.

Needs ``dask[array]``. Without a GPU, set ``DASK_DEVCTX__SIMULATED_DEVICES=2``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, wait
from needs import needs
from pictures import above, picture

from dask_devctx import LocalDeviceCluster, driver, report

MIB = 2**20


def on_gpu(block: Any) -> Any:
    """Return a block of a host array on the task's device."""
    if driver.backend().simulated:
        from dask_devctx import SimulatedArray

        return SimulatedArray.asarray(block)
    import cupy

    return cupy.asarray(block)


def to_host(block: Any) -> Any:
    return block.get()


def draw(done: Any, path: Path) -> None:
    """Write the memory of each device: values that it holds, and those that it has moved away."""
    found = sorted(done.devices, key=lambda device: -device.device_id)  # the first one on top
    names = [f"cuda:{device.device_id}" for device in found]
    held = [device.memory_held / MIB for device in found]
    away = [device.memory_spilled / MIB for device in found]

    def bars(axis: Any) -> None:
        axis.barh(names, held, color="#4477aa", label="on the device")
        axis.barh(names, away, left=held, color="#ee8866", label="in host memory")
        axis.axvline(found[0].device_memory_limit / MIB, color="k", ls="--", label="limit")
        axis.set_xlabel("MiB of values that dask keeps")
        above(axis)

    picture(path, bars, height=1.4 + 0.3 * len(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    parser.add_argument("--limit", type=int, default=8, help="MiB of each device")
    parser.add_argument("--blocks", type=int, default=12, help="in each direction; of 0.5 MiB")
    options = parser.parse_args()
    needs("numpy")
    import dask.array as da

    side = 256 * options.blocks
    with (
        LocalDeviceCluster(
            dashboard_address=":0", device_memory_limit=options.limit * MIB
        ) as cluster,
        Client(cluster) as client,
    ):
        rows = da.arange(side, chunks=256, dtype=float)[:, None]
        host = rows * da.ones(side, chunks=256)[None, :]
        x = host.map_blocks(on_gpu, meta=on_gpu(np.empty((0, 0)))).persist()
        wait(x)  # all blocks are kept
        kept = report(client)
        total = (x + x.T).sum().map_blocks(to_host, meta=np.empty(())).compute()
        done = report(client)

    print(done)
    draw(kept, options.out / "larger_than_memory.png")
    room = options.limit * len(done.devices)
    spilled = sum(device.spilled_nbytes for device in done.devices) / MIB
    print(f"{x.nbytes // MIB} MiB, room for {room} MiB; {spilled:.0f} MiB went to the host")
    right = float(total) == side**2 * (side - 1)
    print("the sum is right" if right else f"the sum is WRONG: {total}")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
