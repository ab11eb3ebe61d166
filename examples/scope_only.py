"""A library function that must not disturb its caller's device; without dask.

Run it as ``python examples/scope_only.py --out DIR``. The function `row_means` computes on the
device of its argument. The caller's current device is the same afterwards, also if there was none,
and no GPU gets a context that nobody asked for. Without a GPU, set
``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from needs import needs
from pictures import picture

from dask_devctx import Device, device_of, devices, driver


def row_means(array: Any) -> Any:
    """Return the mean of each row, computed on the array's own device."""
    with device_of(array):
        return array.mean(axis=1)


def ones(shape: tuple[int, int]) -> Any:
    """Return an array on the current device: CuPy's, or a simulated one."""
    if driver.backend().simulated:
        from dask_devctx import SimulatedArray

        return SimulatedArray(shape) + 1.0
    import cupy

    return cupy.ones(shape)


def job(device: Device) -> bool:
    """Use the library on a thread where nothing is current; return whether nothing leaked."""
    with device:
        data = ones((4, 8))
    before = Device.current()
    means = row_means(data)
    return before is None and Device.current() is None and float(means.get().sum()) == 4.0


def draw(callers: dict[str, list[Device | None]], path: Path) -> None:
    """Write which device was current for two callers: before, inside and after the function."""

    def steps(axis: Any) -> None:
        for (name, states), style in zip(callers.items(), ("o-", "s--"), strict=True):
            axis.plot(["before", "inside", "after"], list(map(str, states)), style, label=name)
        axis.set_ylabel("current device")
        axis.legend(frameon=False, title="the caller has", loc="center left")

    picture(path, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    options = parser.parse_args()
    needs("numpy")
    found = devices()
    with ThreadPoolExecutor() as pool:
        clean = list(pool.map(job, found))
    for device, one in zip(found, clean, strict=True):
        print(f"{device}: {'restored' if one else 'LEFT BEHIND'}")
    with found[0]:
        data = ones((2, 2))
    bare = [Device.current(), device_of(row_means(data)), Device.current()]
    with found[-1] as own:  # a caller with a device of its own
        owner = [Device.current(), device_of(row_means(data)), Device.current()]
    draw({"no device": bare, f"{own}": owner}, options.out / "scope_only.png")
    right = all(clean) and owner[0] is owner[2] is own and bare[0] is bare[2] is None
    print("the callers' devices are right" if right else "the callers' devices are WRONG")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
