"""dask's P2P rechunk: the arrays that a task gives to it, and those that a task gets from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distributed.shuffle._rechunk import ArrayRechunkRun

Change = Callable[[Any], Any]

_lock = threading.Lock()
_n_open = 0


@contextmanager
def rechunked_arrays(given: Change, returned: Change) -> Iterator[None]:
    """While it is open, P2P rechunks in this process change each array on its way in and out.

    The workers of a process share this: the functions of the first one are used.
    """
    global _n_open
    with _lock:
        _n_open += 1
        if _n_open == 1:
            _change(given, returned)
    try:
        yield
    finally:
        with _lock:
            _n_open -= 1
            if _n_open == 0:
                del ArrayRechunkRun.add_partition, ArrayRechunkRun.get_output_partition


def _change(given: Change, returned: Change) -> None:
    add, get = ArrayRechunkRun.add_partition, ArrayRechunkRun.get_output_partition

    def add_partition(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        return add(self, given(data), *args, **kwargs)

    def get_output_partition(self: Any, partition_id: Any, *args: Any, **kwargs: Any) -> Any:
        # dask may give each array once only, and a task without memory for it is tried again.
        ready = vars(self).setdefault("_devctx_ready", {})
        if partition_id not in ready:
            ready[partition_id] = get(self, partition_id, *args, **kwargs)
        found = returned(ready[partition_id])
        del ready[partition_id]
        return found

    ArrayRechunkRun.add_partition = add_partition
    ArrayRechunkRun.get_output_partition = get_output_partition
