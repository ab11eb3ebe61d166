"""``synchronized()``: a scope that waits for its work before it restores."""

from __future__ import annotations

from contextlib import closing

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Context, Device
from dask_devctx.cuda.scope import open_scopes

FAILED = CUresult.CUDA_ERROR_LAUNCH_FAILED


@pytest.fixture(params=["device", "primary", "own"])
def scope(request, machine):
    """A device, its primary context, and an own one."""
    Device(1).primary_context.handle  # noqa: B018 - what nobody uses has nothing to wait for
    if request.param == "own":
        with closing(Context(1)) as own:
            yield own
    else:
        yield Device(1) if request.param == "device" else Device(1).primary_context


@pytest.fixture
def waits(machine):
    """Where the driver was told to wait: the devices that were current."""
    seen = []

    def look(*args):
        seen.append(Device.current())
        return False

    machine.faults.inject("cuCtxSynchronize", CUresult.CUDA_SUCCESS, when=look)
    return seen


# -- as a scope


def test_waits_before_it_restores(scope, waits):
    with Device(0), scope.synchronized() as entered:
        assert entered is scope
        assert Device.current() is Device(1)
        assert waits == []
    assert waits == [Device(1)]
    assert Device.current() is None


def test_an_interrupted_wait_restores(scope, machine):
    def interrupt(*args):
        raise KeyboardInterrupt

    machine.faults.inject("cuCtxSynchronize", FAILED, when=interrupt)
    with Device(2):
        with pytest.raises(KeyboardInterrupt), scope.synchronized():
            pass
        assert open_scopes() == (Device(2),)
        assert Device.current() is Device(2)
    machine.faults.clear()
