"""What names a device, and what is said to what does not."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from cuda.bindings.driver import CUdevice

from dask_devctx import Device
from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.errors import DeviceNotFoundError

A, B, C = (
    "GPU-aa000000-0000-0000-0000-000000000001",
    "GPU-ab000000-0000-0000-0000-000000000002",
    "MIG-cc000000-0000-0000-0000-000000000003",
)
HIDDEN = "GPU-dd000000-0000-0000-0000-000000000004"
INVENTORY = Inventory(
    devices=(
        DeviceInfo(0, A, pci_bus_id="0000:01:00.0"),
        DeviceInfo(1, B, pci_bus_id="0001:0a:00.0"),
        DeviceInfo(2, C, pci_bus_id="0000:03:00.0"),
    ),
    hidden=(DeviceInfo(-1, HIDDEN),),
    visible_devices=f"{A},{B},{C}",
)


def find(which):
    found = naming.find(which, INVENTORY)
    return None if found is None else found.device_id


class Index:
    def __index__(self):
        return 2


@pytest.mark.parametrize(
    ("which", "device_id"),
    [
        (0, 0),
        (2, 2),
        (np.int64(1), 1),
        (np.array(1), 1),
        pytest.param(Index(), 2, id="an index"),
        ("1", 1),
        ("cuda:1", 1),
        ("gpu:2", 2),
        (A, 0),
        (A.upper().replace("GPU", "gpu"), 0),
        ("GPU-aa", 0),
        ("GPU-ab", 1),
        (C, 2),
        ("MIG-c", 2),
        (B.removeprefix("GPU-"), 1),
        (C.removeprefix("MIG-"), 2),
        ("0000:01:00.0", 0),
        ("00000000:01:00.0", 0),
        ("01:00.0", 0),
        ("0001:0A:00.0", 1),
        ("cuda", None),
        ("gpu", None),
    ],
    ids=repr,
)
def test_accepted(which, device_id):
    assert find(which) == device_id


def foreign(module, **attributes):
    """An object whose class says that it comes from another library."""
    cls = type("Device", (), {"__module__": module, "__repr__": lambda self: f"<{module} device>"})
    made = cls()
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize(
    ("which", "device_id"),
    [
        (foreign("torch", type="cuda", index=1), 1),
        (foreign("torch", type="cuda", index=None), None),
        (foreign("cupy.cuda.device", id=2), 2),
        (foreign("numba.cuda.cudadrv.devices", id=1), 1),
        (foreign("numba.cuda.cudadrv.driver", id=CUdevice(1)), 1),
        (foreign("jaxlib._jax", platform="gpu", id=7, local_hardware_id=1), 1),
        (foreign("jaxlib.xla_extension", platform="cuda", id=7, local_hardware_id=0), 0),
        (foreign("cuda.core._device", device_id=2), 2),
        (foreign("cuda.core.experimental._device", device_id=0), 0),
    ],
    ids=repr,
)
def test_devices_of_other_libraries(which, device_id):
    assert find(which) == device_id


@pytest.mark.parametrize(
    "which",
    [
        True,
        np.bool_(True),
        1.5,
        b"1",
        [1],
        pytest.param(object(), id="an object"),
        Device,
        foreign("torch", type=lambda: "torch.cuda.FloatTensor"),  # a tensor
        foreign("torch", type="cuda", index="one"),
        foreign("cupy.cuda.device", id=1.5),
        foreign("cuda.core._device", device_id=None),
        foreign("torch.cuda", idx=1),  # a scope
        foreign("cupy", shape=(2,)),  # an array
        foreign("jaxlib._jax", platform="gpu", local_hardware_id=None),
    ],
    ids=repr,
)
def test_no_way_to_name_a_device(which):
    with pytest.raises(TypeError) as caught:
        find(which)
    message = str(caught.value)
    assert repr(which) in message
    assert type(which).__name__ in message
    assert naming.ACCEPTED in message


@pytest.mark.parametrize(
    ("which", "hint"),
    [
        (3, "Ordinals go from 0 to 2"),
        (-1, "Ordinals go from 0 to 2"),
        ("cuda:9", "Ordinals go from 0 to 2"),
        ("9" * 5000, "A device is an ordinal"),
        ("-1", "A device is an ordinal"),
        ("cuda:x", "A device is an ordinal"),
        ("cpu", "A device is an ordinal"),
        ("auto", "'auto' is for annotations alone: dask.annotate(device='auto'). A device is an"),
        ("none", "'none' is for annotations alone: dask.annotate(device='none'). A device is an"),
        ("any", 'For any device, write dask.annotate(device="auto").'),
        ("", "A device is an ordinal"),
        (" 1", "It has blanks around it"),
        ("١", "A device is an ordinal"),
        ("GPU-xyz", "A device is an ordinal"),
        ("GPU-a", "2 devices have this prefix: add digits"),
        ("GPU-ee", "No device of this machine has this UUID"),
        (HIDDEN, "CUDA_VISIBLE_DEVICES hides it from this process"),
        (HIDDEN.removeprefix("GPU-"), "CUDA_VISIBLE_DEVICES hides it from this process"),
        ("aa000000", "A device is an ordinal"),
        (A + "0", "No device of this machine has this UUID"),
        ("CUDA:1", "A device is an ordinal"),
        ("cuda:1\n", "It has blanks around it"),
        ("0,1", "A device is an ordinal"),
        ("0000:02:00.0", "No visible device has this PCI bus id"),
        (foreign("torch", type="cpu", index=0), "It is not a CUDA device"),
        (foreign("jaxlib._jax", platform="cpu", local_hardware_id=0), "It is not a CUDA device"),
        (foreign("cupy.cuda.device", id=5), "Ordinals go from 0 to 2"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_not_there(which, hint):
    with pytest.raises(DeviceNotFoundError) as caught:
        find(which)
    error = caught.value
    for said in (hint, A, B, C, f"CUDA_VISIBLE_DEVICES is {INVENTORY.visible_devices!r}"):
        assert said in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    # distributed sends an error's context along: the object itself must not be in it
    assert error.__context__ is None or pickle.dumps(error.__context__.args)
