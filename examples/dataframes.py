"""A dataframe job: pandas shuffles rows on the CPU, and the devices sum and rank them.

Run it as ``python examples/dataframes.py --out DIR``. dask shuffles orders by customer; this is
work of pandas, without a device (``device=None``). Then the columns of each partition go to a GPU
and stay there: two tasks use them, where they are. With cuDF, a worker for each GPU groups whole
frames. Without it CuPy computes, and `SimulatedArray` on simulated devices. The totals are compared
with those of pandas alone.

Needs pandas and pyarrow: ``pip install "dask[dataframe]"``. Without a GPU, set
``DASK_DEVCTX__SIMULATED_DEVICES=4``.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, futures_of, wait
from needs import needs
from pictures import lanes

from dask_devctx import LocalDeviceCluster, driver, report

CUSTOMERS, ROWS = 1000, 20_000
STEPS = ("orders", "shuffle-transfer", "shuffle-p2p", "upload", "sums", "largest")


def orders(part: int) -> Any:
    """Return a partition of orders: customers in any order, and whole amounts of money."""
    import pandas as pd

    random = np.random.default_rng(part)
    columns = random.integers(0, CUSTOMERS, ROWS), random.integers(1, 100, ROWS)
    return pd.DataFrame(dict(zip(("customer", "amount"), columns, strict=True)))


def upload(frame: Any) -> Any:
    """Return a partition on the task's device: a frame of cuDF, or a dictionary of arrays."""
    if driver.backend().simulated:
        from dask_devctx import SimulatedArray

        return {name: SimulatedArray.asarray(frame[name].to_numpy()) for name in frame}
    if find_spec("cudf") is not None:
        import cudf

        return cudf.DataFrame.from_pandas(frame)
    import cupy

    return {name: cupy.asarray(frame[name].to_numpy()) for name in frame}


def sums(columns: Any) -> Any:
    """Return the sum of the amounts of each customer, in host memory."""
    if not isinstance(columns, dict):  # cuDF
        found = columns.groupby("customer")["amount"].sum().to_pandas()
        return found.reindex(range(CUSTOMERS), fill_value=0).to_numpy()
    amounts = columns["amount"].astype(float)
    return np.bincount(columns["customer"], weights=amounts, minlength=CUSTOMERS).get()


def largest(columns: Any) -> int:
    """Return the largest amount of one order."""
    return int(columns["amount"].max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the picture")
    parser.add_argument("--partitions", type=int, default=16)
    options = parser.parse_args()
    needs("pandas", "pyarrow")
    import dask.dataframe as dd

    with LocalDeviceCluster(dashboard_address=":0") as cluster, Client(cluster) as client:
        frame = dd.from_map(orders, range(options.partitions)).shuffle("customer")
        with dask.annotate(device=None):  # around persist: pandas alone
            shuffled = client.persist(frame)
            wait(shuffled)
        columns = client.map(upload, futures_of(shuffled))  # they stay on the devices
        totals = client.gather(client.map(sums, columns))
        top = max(client.gather(client.map(largest, columns)))
        done = report(client)

    print(done)
    lanes(done, options.out / "dataframes.png", STEPS)
    import pandas as pd

    whole = pd.concat([orders(part) for part in range(options.partitions)])
    expected = whole.groupby("customer").amount.sum().reindex(range(CUSTOMERS), fill_value=0)
    # Each customer is in one partition after the shuffle.
    apart = all(np.count_nonzero(column) <= 1 for column in np.array(totals).T)
    right = apart and np.array_equal(np.sum(totals, axis=0), expected) and top == whole.amount.max()
    print(f"{len(whole)} orders of {CUSTOMERS} customers, the largest {top}")
    print("totals are right" if right else "totals are WRONG")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
