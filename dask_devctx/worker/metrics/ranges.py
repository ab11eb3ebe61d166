"""NVTX ranges with the tasks' keys, which Nsight Systems shows on the devices' threads."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_DOMAIN: Final = "dask"


class Ranges:
    """Ranges of a process, by the package ``nvtx``."""

    def __init__(self) -> None:
        import nvtx

        self._nvtx: Any = nvtx

    @contextmanager
    def on_thread(self, key: Hashable) -> Iterator[None]:
        """While it is open, this thread has a range of a task."""
        self._nvtx.push_range(str(key), domain=_DOMAIN)
        try:
            yield
        finally:
            self._nvtx.pop_range(domain=_DOMAIN)

    @contextmanager
    def of_process(self, key: Hashable) -> Iterator[None]:
        """While it is open, the process has a range of a coroutine; others may run meanwhile."""
        range_id = self._nvtx.start_range(str(key), domain=_DOMAIN)
        try:
            yield
        finally:
            self._nvtx.end_range(range_id)
