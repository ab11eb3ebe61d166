"""Any text in variables, annotations and the configuration gets an answer or a clear error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import dask
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_devctx import DevicePlugin
from dask_devctx import driver as simulated
from dask_devctx.annotations import HOST_ONLY, requested_device
from dask_devctx.cuda.naming import DeviceInfo, Inventory, find
from dask_devctx.errors import DeviceNotFoundError, DriverUnavailableError

UUID = "GPU-b33ebc8c-95a3-9648-c914-5259efe7a11e"
INVENTORY = Inventory((DeviceInfo(0, UUID, "GPU 0", "0000:01:00.0"),))
PIECES = [UUID, "GPU-", "MIG-", "cuda", "cuda:", "gpu:", "auto", "none", "0000:01:00.0", "01:00.0"]
PIECES += ["0", "1", "-1", "+1", "01", "0x1", "1.5", "1e3", "4294967296", ",", ":", "all", "٣", "²"]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=4).map("".join)
OTHERS = st.sampled_from([b"0", (), [0], {"a": 1}, {1}, object(), int, 1j, ..., range(2)])
ANYTHING = st.one_of(TEXTS, st.none(), st.booleans(), st.integers(), st.floats(), OTHERS)
OPTIONS = ("tasks-per-device", "devices-per-worker", "unannotated", "move-inputs", "replica-limit")
OPTIONS += ("synchronize", "oom-retries")


@settings(max_examples=500)
@given(ANYTHING, st.sampled_from(["assign", "leave"]))
def test_an_annotation(value: Any, unannotated: Any) -> None:
    asked = requested_device({"device": value}, unannotated)
    if asked is not HOST_ONLY:
        with suppress(DeviceNotFoundError, TypeError):
            assert find(asked.name, INVENTORY) in (None, *INVENTORY.devices)


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(OPTIONS), ANYTHING))
def test_the_configuration(chosen: dict[str, Any]) -> None:
    with dask.config.set({f"devctx.{key}": value for key, value in chosen.items()}):
        try:
            options = DevicePlugin().options
        except ValueError as error:
            refused = str(error)
        else:
            refused = ""
    if refused:
        assert "must be" in refused or "is a fraction" in refused
        return
    assert options.tasks_per_device >= 1
    assert options.oom_retries >= 0
    assert options.devices_per_worker is None or options.devices_per_worker >= 1
    assert 0 <= options.replica_limit <= 1


@given(ANYTHING)
def test_simulated_devices(value: Any) -> None:
    with dask.config.set({"devctx.simulated-devices": value}), suppress(DriverUnavailableError):
        assert simulated.simulated_devices() >= 0
