"""The option ``device_memory_limit``: its values, and the bytes that they mean on a device."""

from __future__ import annotations

from typing import Any

import dask
import pytest

from dask_devctx import Device, DevicePlugin
from dask_devctx.worker.values.limits import limit_nbytes

GIB = 2**30


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ("auto", int(0.8 * 16 * GIB)),
        (0.5, 8 * GIB),
        ("0.25", 4 * GIB),
        (1, 16 * GIB),
        (1.0, 16 * GIB),
        (3 * GIB, 3 * GIB),
        ("12 GiB", 12 * GIB),
        ("64 GiB", 16 * GIB),
        ("30 B", 30),
        ("1B", 1),
        (0, None),
        ("0", None),
        (None, None),
    ],
)
def test_each_spelling_means_bytes_of_a_device(given: Any, nbytes: int | None) -> None:
    option = DevicePlugin(device_memory_limit=given).options.device_memory_limit
    assert limit_nbytes(Device(0), option) == nbytes
    with dask.config.set({"devctx.device-memory-limit": given}):
        assert DevicePlugin().options.device_memory_limit == option


def test_the_default_is_auto() -> None:
    assert DevicePlugin().options.device_memory_limit == "auto"


@pytest.mark.parametrize("given", [True, -1, 8, 1.5, "all", "-1 GiB", [1], float("nan")])
def test_other_values_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"device_memory_limit must be 'auto', a fraction"):
        DevicePlugin(device_memory_limit=given)
