"""What each stream of simulated devices comes after, as the driver's calls order it.

Simulated work is done at once, so a reader that comes too early would read the right values. This
keeps CUDA's rules of order instead, and no event is ever reached.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from dask_devctx import Device
from dask_devctx.driver.relaxed import LEGACY_STREAM, PER_THREAD_STREAM
from dask_devctx.driver.simulated import SimulatedMachine

Stream = tuple[int, int]  # a device's ordinal, and a handle
FOREVER = 10**9


class Order:
    """Notes the order of work from here on."""

    def __init__(self, machine: SimulatedMachine) -> None:
        # For each allocation of device memory, as a copy makes one: the ordinal, and the work that
        # the legacy stream there comes after.
        self.before_allocations: list[tuple[int, set[str]]] = []
        self._driver = machine.driver
        self._blocking: set[int] = {LEGACY_STREAM, PER_THREAD_STREAM}
        self._work: dict[Stream, set[str]] = {}
        self._events: dict[int, set[str]] = {}
        for name, note in (
            ("cuEventRecord", self._record),
            ("cuCtxRecordEvent", self._record_all),
            ("cuStreamWaitEvent", self._wait),
            ("cuMemAlloc", self._allocate),
        ):
            machine.faults.inject(name, None, times=FOREVER, when=note)
        machine.faults.inject("cuEventQuery", cuda.CUresult.CUDA_ERROR_NOT_READY, times=FOREVER)

    def stream(self, device: int, *, blocking: bool) -> int:
        """Return a new stream."""
        with Device(device):
            handle = int(self._driver.cuStreamCreate(0 if blocking else 1)[1])
        if blocking:
            self._blocking.add(handle)
        return handle

    def give(self, work: str, device: int, stream: int = LEGACY_STREAM) -> None:
        """Give a stream some work."""
        self._work.setdefault((device, stream), set()).add(work)

    def before(self, device: int, stream: int = LEGACY_STREAM) -> set[str]:
        """Return the work that a stream comes after."""
        if stream not in self._blocking:
            others = {stream}
        elif stream == LEGACY_STREAM:
            others = self._blocking
        else:
            others = {stream, LEGACY_STREAM}
        return set().union(*(self._work.get((device, each), ()) for each in others))

    def _record(self, event: Any, stream: Any) -> bool:
        self._events[int(event)] = self.before(_ordinal(), int(stream))
        return False

    def _record_all(self, context: Any, event: Any) -> bool:
        given = (work for (at, _), work in self._work.items() if at == _ordinal())
        self._events[int(event)] = set().union(*given)
        return False

    def _wait(self, stream: Any, event: Any, flags: Any) -> bool:
        self._work.setdefault((_ordinal(), int(stream)), set()).update(self._events[int(event)])
        return False

    def _allocate(self, nbytes: int) -> bool:
        here = _ordinal()
        self.before_allocations.append((here, self.before(here)))
        self.give("copy", here)
        return False


def _ordinal() -> int:
    device = Device.current()
    return device.device_id
