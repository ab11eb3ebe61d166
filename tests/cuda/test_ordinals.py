"""What an ordinal means is settled when CUDA is initialised, and looked up once from then on."""

from __future__ import annotations

import pytest

from dask_devctx import Device
from dask_devctx.driver import backend
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DeviceNotFoundError


def test_before_cuda_is_initialised_the_environment_counts(
    machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Device(0).uuid == machine.gpus[0].uuid
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert Device(0).uuid == machine.gpus[2].uuid
    assert backend().ordinals == {}


def test_afterwards_it_does_not(machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    with Device(1) as device:
        pass
    assert Device(1) is Device("1") is device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert Device(1) is device
    assert backend().ordinals == {1: device}


@pytest.mark.parametrize("wrong", [True, 1.0, -1, 4])
def test_what_is_no_ordinal_stays_none(machine: SimulatedMachine, wrong: object) -> None:
    with Device(1):
        pass
    assert Device(1).device_id == 1
    with pytest.raises((TypeError, DeviceNotFoundError)):
        Device(wrong)
