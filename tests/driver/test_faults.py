"""Faults that are injected and cleared."""

from __future__ import annotations

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device
from dask_devctx.errors import DriverError
from tests.device_memory import read

ILLEGAL = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda calls, pointer: calls.synchronize(), id="context"),
        pytest.param(lambda calls, pointer: calls.work.stream_synchronize(0), id="stream"),
        pytest.param(lambda calls, pointer: read(calls.work, pointer, 4), id="copy"),
    ],
)
def test_who_waits_for_the_kernel_that_breaks_it_is_told(machine, wait):
    calls = Device(0)._backend.calls
    with Device(0):
        pointer = calls.work.allocate(16)
        machine.faults.poison(ILLEGAL, after_s=0.05)
        calls.work.copy(pointer, pointer + 8, 8, 0)  # the kernel still runs
        with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
            wait(calls, pointer)
