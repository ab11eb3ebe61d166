"""``CUDA_VISIBLE_DEVICES``, compared with driver 580 on a machine with two H200s."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_devctx.driver.visible import PhysicalDevice, visible_devices

A = "GPU-b33ebc8c-95a3-9648-c914-5259efe7a11e"
B = "GPU-a5d60d8e-c4e9-fdee-e6e3-e65db51e6e82"
TWO = [PhysicalDevice(A), PhysicalDevice(B)]

# the value, and the indices of the machine's devices that CUDA showed
MEASURED = [
    (None, [0, 1]),
    ("", []),
    ("0", [0]),
    ("1", [1]),
    ("1,0", [1, 0]),
    ("0,0", []),
    ("0,1,0", []),
    ("-1", []),
    ("0,-1,1", [0]),
    ("2", []),
    ("1,2,0", [1]),
    ("0,,1", [0]),
    (",0", []),
    (" 1 , 0", [1, 0]),
    ("1;0", [1]),
    ("0x1", [0]),
    ("1abc", [1]),
    ("+1", [1]),
    ("abc", []),
    ("0,abc,1", [0]),
    ("NoDevFiles", []),
    (A, [0]),
    (f"{B},{A}", [1, 0]),
    (A[:12], [0]),
    (A[:6], [0]),
    ("GPU-", []),
    ("GPU", []),
    (A.lower(), []),
    (A.upper(), [0]),
    (A[4:], []),
    (f"0,{A}", [0]),
    (f"{A},1", [0]),
    (f"1,{A[:10]}", [1]),
    ("0,GPU-ffff,1", [0]),
    ("MIG-1234", []),
    ("0,MIG-1234", [0]),
    ("gpu" + A[3:], []),
    (" " + A, []),
    (A + " ", [0]),
    (A + "x", [0]),
    ("1\t,0", [1, 0]),
    ("01", [1]),
    ("0.5", [0]),
    ("1 0", [1]),
    ("0 1,1", [0, 1]),
    ("99999999999999999999", []),
    ("4294967296", [0]),
    ("-0", [0]),
    ("1,0,", [1, 0]),
]


@pytest.mark.parametrize(("value", "shown"), MEASURED)
def test_as_measured(value, shown):
    assert visible_devices(value, TWO).uuids == tuple(TWO[n].uuid for n in shown)


@pytest.mark.parametrize(
    ("value", "entry", "reason"),
    [
        ("0,7,1", "7", "the machine has 2 devices"),
        ("0,abc", "abc", "it is not an index, as the first entry is"),
        (f"{A},1", "1", "it is not a UUID, as the first entry is"),
        ("GPU-ff", "GPU-ff", "no device has this UUID"),
        ("GPU-", "GPU-", "several devices have this prefix"),
        ("1,1", "1", "a device that is named twice hides every device"),
    ],
)
def test_says_which_entry_hid_the_rest(value, entry, reason):
    visible = visible_devices(value, TWO)
    assert (visible.stopped_at, visible.reason) == (entry, reason)


# -- MIG, by NVIDIA's user guide

M0, M1, M2 = (f"MIG-{n}0000000-0000-0000-0000-000000000000" for n in "123")
IN_MIG_MODE = PhysicalDevice(A, (M0, M1), mig_enabled=True)
OTHER_IN_MIG_MODE = PhysicalDevice(B, (M2,), mig_enabled=True)
EMPTY_MIG = PhysicalDevice(A, (), mig_enabled=True)
WHOLE = PhysicalDevice(B)


@pytest.mark.parametrize(
    ("value", "devices", "shown"),
    [
        (None, [IN_MIG_MODE], (M0,)),  # one instance at most
        (None, [IN_MIG_MODE, OTHER_IN_MIG_MODE], (M0,)),
        (None, [IN_MIG_MODE, WHOLE], (B,)),  # a whole GPU hides all instances
        (None, [EMPTY_MIG], ()),
        (M1, [IN_MIG_MODE], (M1,)),
        (f"{M1},{M0}", [IN_MIG_MODE], (M1,)),
        (M1[:6], [IN_MIG_MODE, WHOLE], (M1,)),
        ("MIG-", [IN_MIG_MODE], ()),  # several instances have this prefix
        (f"{B},{M0}", [IN_MIG_MODE, WHOLE], (M0,)),
        ("0", [IN_MIG_MODE], (M0,)),
        (A, [IN_MIG_MODE], (M0,)),
        ("0", [EMPTY_MIG], ()),
    ],
)
def test_mig(value, devices, shown):
    assert visible_devices(value, devices).uuids == shown


# -- properties of any value

ENTRIES = st.one_of(
    st.integers(-3, 5).map(str),
    st.sampled_from([A, B, A[:9], B.upper(), "", "abc", "GPU-", " 1", "1x", M0]),
    st.text(st.characters(exclude_characters=",", exclude_categories=["Cs"]), max_size=6),
)
VALUES = st.lists(ENTRIES, max_size=6).map(",".join)


@given(VALUES)
def test_shows_devices_of_the_machine_once_each(value):
    shown = visible_devices(value, TWO).uuids
    assert len(set(shown)) == len(shown)
    assert set(shown) <= {A, B}


@given(VALUES, VALUES)
def test_an_unusable_entry_hides_all_after_it(before, after):
    cut = visible_devices(f"{before},abc", TWO)
    assert visible_devices(f"{before},abc,{after}", TWO) == cut
