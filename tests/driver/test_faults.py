"""Faults that tests inject, and take back."""

from __future__ import annotations

from cuda.bindings.driver import CUresult

from dask_devctx.driver.simulated import SimulatedMachine


def test_nothing_fails_after_clear() -> None:
    machine = SimulatedMachine(1)
    machine.faults.inject("cuInit", CUresult.CUDA_ERROR_UNKNOWN, times=2)
    assert machine.driver.cuInit(0) == (CUresult.CUDA_ERROR_UNKNOWN,)
    machine.faults.poison(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert machine.driver.cuMemFree(0) == (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)

    machine.faults.clear()
    assert machine.driver.cuInit(0) == (CUresult.CUDA_SUCCESS,)
    assert machine.driver.cuMemFree(0) == (CUresult.CUDA_SUCCESS,)
    assert machine.faults.calls["cuInit"] == 2
