"""A library function that must not disturb its caller's device; without dask.

Run it as ``python examples/scope_only.py``. The function `row_means` computes on the device of its
argument. The caller's current device is the same afterwards, also if there was none, and no GPU
gets a context that nobody asked for. Without a GPU, two simulated devices take their place.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from dask_devctx import Device, DriverUnavailableError, device_of, devices, driver
from dask_devctx.driver.simulated import SimulatedMachine


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


def main() -> int:
    with ExitStack() as stack:
        try:
            found = devices()
        except DriverUnavailableError:
            stack.enter_context(driver.use(SimulatedMachine(2).backend()))
            found = devices()
        with ThreadPoolExecutor() as pool:
            clean = list(pool.map(job, found))
        for device, one in zip(found, clean, strict=True):
            print(f"{device}: {'restored' if one else 'LEFT BEHIND'}")
        last = found[-1]
        with last:  # a caller with a device of its own
            with found[0]:
                data = ones((2, 2))
            row_means(data)
            same = Device.current() is last
        print(f"the caller's device: {'the same' if same else 'CHANGED'}")
        return int(not (all(clean) and same))


if __name__ == "__main__":
    sys.exit(main())
