"""The errors of tasks that got no device, with the scheduler's knowledge."""

from __future__ import annotations

import pytest

from dask_devctx import DeviceNotFoundError
from dask_devctx.annotations.runs import PRESENT
from dask_devctx.worker.runs import explained


@pytest.mark.parametrize("ordinal", [0, 1])
def test_devices_of_the_same_ordinal_are_explained(ordinal: int) -> None:
    present = ["cuda:0 (GPU-1)", f"cuda:{ordinal} (GPU-2)"]
    error = explained(DeviceNotFoundError(2, present[:1], "0"), {PRESENT: present})
    assert f"vailable: {', '.join(present)};" in str(error)
    remedy = "Each worker counts the devices that its own CUDA_VISIBLE_DEVICES shows: name a device"
    assert (remedy in str(error)) is (ordinal == 0)
