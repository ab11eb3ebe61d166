"""What a worker holds in host memory, as dask counts it: not what is on its devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from distributed import Worker
from zict import Buffer

from dask_devctx.transfer import nbytes_by_device


class HostMemory:
    """While it is open, a worker spills what is in host memory, and not for what is on devices.

    Parameters
    ----------
    worker
        The worker.
    written
        Called with a key and its value whenever dask is about to write it to disk.
    read_back
        Called with a key and its value whenever dask has read it from disk.

    Notes
    -----
    dask counts the bytes of a CuPy array like those of a NumPy one, and writes to disk what goes
    beyond a share of ``memory_limit``, which is host memory. A machine whose GPUs have more memory
    than its host would spill long before they are full, and make no room by it.

    Concerns the share ``distributed.worker.memory.target``. What dask spills since the process
    itself has grown beyond ``…memory.spill``, it chooses by age alone, values on devices too.

    References
    ----------
    ``zict.Buffer``: its ``weight`` and ``slow_to_fast_callbacks``; ``zict.LRU``: its ``on_evict``.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        written: Callable[[Hashable, object], None],
        read_back: Callable[[Hashable, object], None],
    ) -> None:
        self._written = written
        self._read_back = read_back
        # A worker without a memory limit has a dictionary that spills nothing.
        self._data: Buffer[Any, Any] | None = (
            worker.data if isinstance(worker.data, Buffer) else None
        )
        if self._data is not None:
            self._weight = self._data.weight
            self._data.weight = self._data.fast.weight = self._in_host_memory
            self._data.fast.on_evict.insert(0, written)  # the next one writes it
            self._data.slow_to_fast_callbacks.append(read_back)

    def close(self) -> None:
        """Count as before; what is there already stays counted as it was."""
        if self._data is not None:
            self._data.fast.on_evict.remove(self._written)
            self._data.slow_to_fast_callbacks.remove(self._read_back)
            self._data.weight = self._data.fast.weight = self._weight

    def _in_host_memory(self, key: Hashable, value: object) -> float:
        counted = self._weight(key, value)
        try:
            on_devices = sum(nbytes_by_device.estimated(value).places.values())
        except Exception:  # somebody's type; the task that is given the value will say so
            return counted
        # Not every library's arrays count as large as they are.
        return max(counted - on_devices, 0)
