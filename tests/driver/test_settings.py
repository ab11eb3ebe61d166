"""The number of simulated devices, and the size of their memory."""

from __future__ import annotations

import os
import sys

import dask
import pytest

import dask_devctx.config  # noqa: F401 - the section's defaults
from dask_devctx.driver import settings
from dask_devctx.errors import DriverUnavailableError


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [
        ("16 GiB", 16 * 2**30),
        ("500MB", 500_000_000),
        ("0.5 tib", 2**39),
        ("2 kB", 2000),
        ("1e9", 10**9),
        (2**20, 2**20),
        ("123 B", 123),
        ("", 16 * 2**30),
        (None, 16 * 2**30),
    ],
)
def test_simulated_memory(said, nbytes):
    with dask.config.set({"devctx.simulated-memory": said}):
        assert settings.simulated_memory() == nbytes


@pytest.mark.parametrize("wrong", ["much", "-1 GiB", "GiB", "1.2.3 GB", 0, True, "1e999", "nan"])
def test_no_size(wrong):
    with (
        dask.config.set({"devctx.simulated-memory": wrong}),
        pytest.raises(DriverUnavailableError, match="must be a size such as"),
    ):
        settings.simulated_memory()


def test_the_default_is_the_configurations(monkeypatch):
    assert settings.simulated_memory() == 16 * 2**30
    monkeypatch.delitem(sys.modules, "dask.config")
    assert settings.simulated_memory() == 16 * 2**30


def without_dask():
    import sys

    from dask_devctx import Device

    print(Device(1).memory_info.total, "dask" in sys.modules)


@pytest.mark.parametrize("said", ["3 GiB", "3221225472"])
def test_a_program_without_dask_reads_the_environment(child, said):
    done = child(without_dask, env={**os.environ, "DASK_DEVCTX__SIMULATED_MEMORY": said})
    assert done.stdout.split() == [str(3 * 2**30), "False"]
