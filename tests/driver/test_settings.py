"""The number of simulated devices, and the size of their memory."""

from __future__ import annotations

import os
import sys

import dask
import pytest

from dask_devctx import driver as settings
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


def test_a_default_that_is_configured_precedes_the_environment(monkeypatch):
    assert settings.simulated_memory() == 16 * 2**30
    monkeypatch.setenv("DASK_DEVCTX__SIMULATED_DEVICES", "2")
    monkeypatch.setenv("DASK_DEVCTX__SIMULATED_MEMORY", "1 GiB")
    assert settings.simulated_devices() == 2
    with dask.config.set({"devctx.simulated-devices": 0, "devctx.simulated-memory": "16 GiB"}):
        assert settings.simulated_devices() == 0
        assert settings.simulated_memory() == 16 * 2**30


def without_dask():
    from dask_devctx import Device

    print(Device(1).memory_info.total, "dask" in sys.modules)


@pytest.mark.parametrize(("said", "gib"), [("3 GiB", 3), ("3221225472", 3), (None, 16)])
def test_a_program_without_dask_reads_the_environment(child, said, gib):
    done = child(without_dask, env={**os.environ, "DASK_DEVCTX__SIMULATED_MEMORY": said})
    assert done.stdout.split() == [str(gib * 2**30), "False"]


@pytest.mark.parametrize("imports", ["dask_devctx.config", "dask", "os"])
def test_a_variable_that_changes_after_the_import_counts(child, imports):
    def change(imports):
        import importlib

        for name in ("dask_devctx", imports):
            importlib.import_module(name)
        from dask_devctx import driver as settings

        for key in ("simulated-devices", "simulated-memory"):
            read = getattr(settings, key.replace("-", "_"))
            os.environ[f"DASK_DEVCTX__{key.upper().replace('-', '_')}"] = "2"
            assert read() == 2
            if imports != "os":
                import dask

                with dask.config.set({f"devctx.{key}": 5}):
                    assert read() == 5

    child(change, imports, env={"DASK_DEVCTX__SIMULATED_MEMORY": "3"})


@pytest.mark.parametrize("remedy", ["variable", "configuration"])
def test_the_remedy_works_in_the_process_that_had_no_devices(child, remedy):
    def without_devices(remedy):
        import pytest

        import dask_devctx
        from dask_devctx import driver
        from tests.conftest import no_gpus

        driver.real = no_gpus
        for use in (dask_devctx.devices, dask_devctx.Device, dask_devctx.devices):
            with pytest.raises(dask_devctx.DriverUnavailableError, match="SIMULATED_DEVICES=4"):
                use()
        # nothing can be current where there is no driver
        assert dask_devctx.Device.current() is dask_devctx.Context.current() is None
        if remedy == "variable":
            os.environ["DASK_DEVCTX__SIMULATED_DEVICES"] = "2"
        else:
            import dask

            dask.config.set({"devctx.simulated-devices": 2})
        with dask_devctx.Device(1) as device:
            assert dask_devctx.devices() == (dask_devctx.Device(0), device)
        os.environ["DASK_DEVCTX__SIMULATED_DEVICES"] = "3"
        assert len(dask_devctx.devices()) == 2  # what was found stays

    child(without_devices, remedy, env={"DASK_DEVCTX__SIMULATED_DEVICES": None})
