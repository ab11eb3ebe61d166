"""Copies of rows at a pitch: boxes, each told by a ``CUDA_MEMCPY3D``, many in a table."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from importlib.resources import files
from typing import Any

from dask_devctx.driver.checked import Checked

BOX_NBYTES = 200
MOST = 20  # that the kernel takes in a launch
# A `CUlaunchConfig`: the grid, the block, no shared memory, the stream, no attributes. A block has
# eight rows of 32 threads; about so many blocks keep all multiprocessors busy.
_LAUNCH = struct.Struct("7I4xQ16x")
_BLOCKS = 2048


class Boxes:
    """Enqueues copies of boxes in the current context; a table of them begins at an address."""

    def __init__(
        self, checked: Checked, relaxed_capture: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._relaxed_capture = relaxed_capture
        self._driver, self._types = checked.driver, checked.types
        self._value, self._called = checked.value, checked.called

    def copy(self, table: int, count: int, stream: int) -> None:
        """Enqueue each copy by a call of the driver's, which reads the box before this returns."""
        for box in range(table, table + count * BOX_NBYTES, BOX_NBYTES):
            given = self._types.CUDA_MEMCPY3D(box)  # no copy
            self._value(self._driver.cuMemcpy3DAsync, given, stream)

    def copy_here(
        self, table: int, count: int, extent: tuple[int, int], stream: int, *, at_once: bool = False
    ) -> None:
        """Enqueue copies within the device's memory, ``MOST`` in a launch of a kernel.

        ``extent`` is the most bytes of a row and the most rows. The table has memory for further
        ``MOST`` boxes. It is read before this returns.
        """
        with self._relaxed_capture():  # the first launch loads the kernel
            for first in range(0, count, MOST):
                n = min(MOST, count - first)
                down = max(min(extent[1] // 8, _BLOCKS // n), 1)
                across = max(min(extent[0] // 2048, _BLOCKS // n // down), 1)
                config = array("B", _LAUNCH.pack(n, down, across, 32, 8, 1, 0, stream))
                boxes = array("Q", (table + first * BOX_NBYTES,))
                at, of = config.buffer_info()[0], boxes.buffer_info()[0]
                if at_once and self._called("cuLaunchKernelEx", 11060, at, self._kernel, of):
                    continue
                given = self._types.CUlaunchConfig(at)
                self._value(self._driver.cuLaunchKernelEx, given, self._kernel, of, 0)

    @cached_property
    def _kernel(self) -> int:
        """The kernel of ``csrc/copy_boxes.cu``, for all contexts; it stays loaded."""
        code = files("dask_devctx.driver").joinpath("copy_boxes.ptx").read_bytes()
        library = self._value(self._driver.cuLibraryLoadData, code, [], [], 0, [], [], 0)
        return int(self._value(self._driver.cuLibraryGetKernel, library, b"copy_boxes"))
