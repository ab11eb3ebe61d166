"""Targets that a user reaches: variables, annotations and the configuration."""

from __future__ import annotations

import random

import dask

from dask_devctx import DevicePlugin
from dask_devctx.annotations import HOST_ONLY, requested_device
from dask_devctx.cuda.discovery import DeviceInfo, Inventory
from dask_devctx.cuda.naming import find
from dask_devctx.driver import settings
from dask_devctx.driver.visible import PhysicalDevice, visible_devices
from dask_devctx.errors import DeviceNotFoundError, DriverUnavailableError
from tests.fuzz.inputs import MIG, UUIDS, anything, text

MACHINES = [
    [],
    [PhysicalDevice(uuid) for uuid in UUIDS],
    [PhysicalDevice(uuid, MIG if n == 2 else (), n == 2) for n, uuid in enumerate(UUIDS)],
    [PhysicalDevice(UUIDS[0], MIG, True)],
]
INVENTORY = Inventory(
    tuple(
        DeviceInfo(n, uuid, f"GPU {n}", f"0000:{n:02x}:00.0") for n, uuid in enumerate(UUIDS[:3])
    ),
    (DeviceInfo(-1, UUIDS[3]),),
)


def fuzz_visible_devices(chance: random.Random) -> str:
    machine = chance.choice(MACHINES)
    value = text(chance)
    seen = visible_devices(value, machine)  # never raises
    known = {device.uuid for device in machine if not device.mig_enabled}
    known |= {mig for device in machine for mig in device.mig}
    assert set(seen.uuids) <= known, value
    assert len(set(seen.uuids)) == len(seen.uuids), value
    assert (seen.stopped_at is None) == (not seen.reason), value
    assert seen.stopped_at is None or seen.stopped_at in value, value
    return "shown" if seen.uuids else "hidden"


def fuzz_device_names(chance: random.Random) -> str:
    value = anything(chance)
    try:
        found = find(value, INVENTORY)
    except DeviceNotFoundError as error:
        return "not found" if str(error) else "without words"
    except TypeError:
        return "no name"
    assert found is None or found in INVENTORY.devices, value
    return "current" if found is None else "found"


def fuzz_annotations(chance: random.Random) -> str:
    value = anything(chance)
    asked = requested_device(
        chance.choice([{"device": value}, {"device": value, "x": 1}, {}, None]),
        "key",
        chance.choice(["assign", "leave"]),
    )
    if asked is HOST_ONLY:
        return "none"
    try:
        find(asked.name, INVENTORY)
    except (DeviceNotFoundError, TypeError):
        return "refused"
    return "a device"


def fuzz_configuration(chance: random.Random) -> str:
    settings = {
        f"devctx.{key}": anything(chance)
        for key in (
            "tasks-per-device",
            "devices-per-worker",
            "unannotated",
            "move-inputs",
            "replica-limit",
            "synchronize",
            "oom-retries",
        )
        if chance.random() < 0.4
    }
    with dask.config.set(settings):
        try:
            options = DevicePlugin().options
        except ValueError as error:
            right = "must be" in str(error) or "is a fraction" in str(error)
            return "refused" if right else "refused without the reason"
    assert options.tasks_per_device >= 1
    assert options.oom_retries >= 0
    assert options.devices_per_worker is None or options.devices_per_worker >= 1
    assert 0 <= options.replica_limit <= 1
    return "accepted"


def fuzz_simulated_devices(chance: random.Random) -> str:
    with dask.config.set({"devctx.simulated-devices": anything(chance)}):
        try:
            count = settings.simulated_devices()
        except DriverUnavailableError:
            return "refused"
    assert isinstance(count, int)
    assert count >= 0
    return "accepted"
