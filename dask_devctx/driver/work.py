"""The driver's calls for work on devices: events, streams, memory.

Scopes do not need them. Copies between devices do, and so do probes of a device's health.
"""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from contextlib import nullcontext
from functools import cached_property
from importlib.resources import files
from typing import Final

from dask_devctx.driver import statuses
from dask_devctx.driver.checked import Checked
from dask_devctx.driver.relaxed import Look, RelaxedCapture
from dask_devctx.errors import DeviceMemoryError, DriverError

IPC_HANDLE_NBYTES = 64
# A `CUDA_MEMCPY3D`, and the most of them that the kernel takes in a launch.
BOX_NBYTES: Final = 200
MOST: Final = 20
# A `CUlaunchConfig`: the grid, the block, no shared memory, the stream, no attributes. A block has
# eight rows of 32 threads; about so many blocks keep all multiprocessors busy.
_LAUNCH = struct.Struct("7I4xQ16x")
_BLOCKS = 2048
# CUDA's flags: the event measures no time, which makes it faster; the legacy default stream does
# not wait for the stream; opened memory can be reached from other devices, locked memory from all.
_DISABLE_TIMING, _NON_BLOCKING, _ENABLE_PEER_ACCESS, _FOR_ALL_CONTEXTS = 2, 1, 1, 1


class WorkCalls:
    """Checked calls for work, most of them in the current context; few spoil a capture."""

    def __init__(self, checked: Checked) -> None:
        # Events that are not used now, by the number of their context, and whether they are timed.
        self.free_events: defaultdict[tuple[int | None, bool], list[int]] = defaultdict(list)
        self.look = Look(self, checked)
        self.driver = checked.driver
        self.types = checked.types
        self._value, self._error = checked.value, checked.error
        self._status, self._out, self._called = checked.status, checked.out, checked.called

    # -- events: points in the work that a device was given

    # A stream has room for about a thousand launches. While it is full, what adds work to it waits
    # for the device, and so does making an event; while the legacy stream is full, all of it waits.
    # So these calls go through the bindings, which release the GIL; with ``at_once``, which is for
    # calls that have room, by their address.

    def event_create(self, *, timed: bool = False) -> int:
        """Create an event of the current context; ``timed`` ones know when they were reached."""
        flags = 0 if timed else _DISABLE_TIMING
        return int(self._value(self.driver.cuEventCreate, flags))

    def event_record(self, event: int, stream: int, *, at_once: bool = False) -> None:
        """Make the event stand for all work that the stream has been given so far."""
        if not (at_once and self._called("cuEventRecord", event, stream)):
            self._value(self.driver.cuEventRecord, event, stream)

    def event_record_unless_captured(self, event: int, stream: int) -> bool:
        """Do as :meth:`event_record`; False where that would spoil or join a graph's capture."""
        if self.is_capturing(stream):
            return False
        try:
            self.event_record(event, stream)
        except DriverError as error:
            if error.code != statuses.CAPTURE_IMPLICIT:  # a capture began just now
                raise
            return False
        return True

    def event_seconds(self, start: int, end: int) -> float:
        """Return the seconds from one timed event to another; the work of both is done."""
        return float(self._value(self.driver.cuEventElapsedTime, start, end)) / 1000

    def stream_create(self) -> int:
        """Create a stream, for which the legacy default stream of its context does not wait."""
        return int(self._value(self.driver.cuStreamCreate, _NON_BLOCKING))

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is being captured into a graph; this spoils no graph.

        Work for such a stream goes into the graph. The legacy default stream counts while a stream
        for which it waits is captured: work for it would fail and spoil the graph.
        """
        cell = array("i", (0,))
        status = self._status("cuStreamIsCapturing", stream, cell.buffer_info()[0])
        captured: int | None = cell[0]
        if status is None:
            status, captured = self.driver.cuStreamIsCapturing(stream)
        if status == statuses.CAPTURE_IMPLICIT:
            return True
        if status != 0:
            raise self._error("cuStreamIsCapturing", status)
        return captured != 0

    def stream_wait(self, stream: int, event: int) -> None:
        """Make all later work of the stream wait for an event, which may be of any device."""
        self._value(self.driver.cuStreamWaitEvent, stream, event, 0)

    # -- copies of rows at a pitch: each box is a `CUDA_MEMCPY3D` in a table at an address

    def copy_boxes(self, table: int, count: int, stream: int) -> None:
        """Enqueue each copy by a call of the driver's, which reads the box before this returns."""
        for box in range(table, table + count * BOX_NBYTES, BOX_NBYTES):
            given = self.types.CUDA_MEMCPY3D(box)  # no copy
            self._value(self.driver.cuMemcpy3DAsync, given, stream)

    def copy_boxes_here(
        self, table: int, count: int, extent: tuple[int, int], stream: int, *, at_once: bool = False
    ) -> None:
        """Enqueue copies of at most ``extent`` bytes and rows, ``MOST`` boxes in a launch."""
        # The table has memory for further `MOST` boxes, and is read before this returns.
        with RelaxedCapture(self):  # the first launch loads the kernel
            for first in range(0, count, MOST):
                n = min(MOST, count - first)
                down = max(min(extent[1] // 8, _BLOCKS // n), 1)
                across = max(min(extent[0] // 2048, _BLOCKS // n // down), 1)
                config = array("B", _LAUNCH.pack(n, down, across, 32, 8, 1, 0, stream))
                boxes = array("Q", (table + first * BOX_NBYTES,))
                at, of = config.buffer_info()[0], boxes.buffer_info()[0]
                if at_once and self._called("cuLaunchKernelEx", at, self._kernel, of):
                    continue
                given = self.types.CUlaunchConfig(at)
                self._value(self.driver.cuLaunchKernelEx, given, self._kernel, of, 0)

    @cached_property
    def _kernel(self) -> int:
        """The kernel of ``csrc/copy_boxes.cu``, for all contexts; it stays loaded."""
        code = files("dask_devctx.driver").joinpath("copy_boxes.ptx").read_bytes()
        library = self._value(self.driver.cuLibraryLoadData, code, [], [], 0, [], [], 0)
        return int(self._value(self.driver.cuLibraryGetKernel, library, b"copy_boxes"))

    # -- memory of the current context

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes."""
        free, total = self._value(self.driver.cuMemGetInfo)
        return int(free), int(total)

    def allocate(self, nbytes: int, *, as_a_user: bool = False) -> int:
        """Return memory; an allocation ``as_a_user`` may spoil captures, as a library's would."""
        try:
            with nullcontext() if as_a_user else RelaxedCapture(self):
                return int(self._value(self.driver.cuMemAlloc, nbytes))
        except DeviceMemoryError as error:
            error.nbytes = nbytes
            raise

    def free(self, pointer: int) -> None:
        with RelaxedCapture(self):
            self._value(self.driver.cuMemFree, pointer)

    def copy_peer(
        self, target: int, context: int, source: int, source_context: int, nbytes: int, stream: int
    ) -> None:
        """Enqueue a copy between two contexts; without peer access it goes through the host."""
        ends = target, context, source, source_context
        self._value(self.driver.cuMemcpyPeerAsync, *ends, nbytes, stream)

    def exchange_capture_mode(self, mode: int) -> int:
        """Set this thread's capture mode for graphs; return the previous mode."""
        before = self._out("cuThreadExchangeStreamCaptureMode", mode)
        if before is not None:
            return before & 0xFFFFFFFF
        kind = self.types.CUstreamCaptureMode
        return int(self._value(self.driver.cuThreadExchangeStreamCaptureMode, kind(mode)))

    # -- memory between processes

    def ipc_export(self, pointer: int) -> bytes:
        """Return a handle with which other processes open the allocation around this address."""
        import ctypes  # not with the module: a subinterpreter cannot load it

        with RelaxedCapture(self):
            handle = self._value(self.driver.cuIpcGetMemHandle, pointer)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_NBYTES)

    def ipc_open(self, handle: bytes) -> int:
        """Open another process's allocation in the current context; return its address."""
        # The first opening takes milliseconds. Each one has to be closed in the same context.
        import ctypes

        given = self.types.CUipcMemHandle()
        if len(handle) != IPC_HANDLE_NBYTES:
            raise ValueError(f"a handle has {IPC_HANDLE_NBYTES} bytes, got {len(handle)}")
        ctypes.memmove(given.getPtr(), handle, IPC_HANDLE_NBYTES)
        with RelaxedCapture(self):
            return int(self._value(self.driver.cuIpcOpenMemHandle, given, _ENABLE_PEER_ACCESS))

    def ipc_close(self, pointer: int) -> None:
        with RelaxedCapture(self):
            self._value(self.driver.cuIpcCloseMemHandle, pointer)

    def copy(
        self, target: int, source: int, nbytes: int, stream: int, *, at_once: bool = False
    ) -> None:
        """Enqueue a copy between any two device addresses of this process."""
        if not (at_once and self._called("cuMemcpyAsync", target, source, nbytes, stream)):
            self._value(self.driver.cuMemcpyAsync, target, source, nbytes, stream)

    def copy_out(self, host: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from a device to the host; without page-locked memory, this may wait."""
        self._value(self.driver.cuMemcpyDtoHAsync, host, source, nbytes, stream)

    def copy_in(self, target: int, host: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from a host address to a device address, as :meth:`copy_out` does."""
        self._value(self.driver.cuMemcpyHtoDAsync, target, host, nbytes, stream)

    def lock_pages(self, host: int, nbytes: int) -> None:
        """Page-lock host memory for all contexts; whole pages, which are not locked yet."""
        with RelaxedCapture(self):
            self._value(self.driver.cuMemHostRegister, host, nbytes, _FOR_ALL_CONTEXTS)

    def unlock_pages(self, host: int) -> None:
        """Undo :meth:`lock_pages` at this address."""
        with RelaxedCapture(self):
            self._value(self.driver.cuMemHostUnregister, host)

    def stream_synchronize(self, stream: int) -> None:
        """Wait until the stream has finished its work."""
        with RelaxedCapture(self):
            self._value(self.driver.cuStreamSynchronize, stream)
