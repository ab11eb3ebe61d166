"""Real GPUs for this process: for tests that are marked ``gpu``, by which they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dask_devctx import Device, driver
from dask_devctx.driver import backends
from dask_devctx.transfer import release_held


@pytest.fixture
def two_gpus() -> Iterator[None]:
    """The real driver, on device 0; afterwards both devices are done and nothing is held."""
    # Libraries that make their device current and leave it so do it inside this scope.
    with driver.use(backends.real()), Device(0):
        yield
        for device in (0, 1):
            Device(device).sync()
        assert release_held() == 0
