"""The frame of each function of the simulated driver: injected faults first, then its body."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as types

Status = types.CUresult
OK = Status.CUDA_SUCCESS


def function(outputs: int, needs_init: bool = True) -> Callable[[Any], Any]:
    """Make a method a driver function that returns its status and ``outputs`` values."""

    def decorate(body: Callable[..., tuple[Any, ...]]) -> Any:
        @functools.wraps(body)
        def call(self: Any, *args: Any) -> tuple[Any, ...]:
            status = self._faults.of_call(body.__name__, args)
            # The real driver answers so in a process that was forked after cuInit.
            if status is None and needs_init and self._pid != os.getpid():
                status = Status.CUDA_ERROR_NOT_INITIALIZED
            if status is None:
                status = self._refused(body.__name__)
            if status is None:
                status, *values = body(self, *args)
            else:
                values = []
            return (status, *values, *[None] * (outputs - len(values)))

        return call

    return decorate
