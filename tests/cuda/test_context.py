"""``Context``: owned, borrowed and primary ones, and all that can be read and set on them."""

# ruff: noqa: PT031

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from cuda.bindings import driver as types

from dask_devctx import Context, ContextFlags, Device, Limit, PrimaryContext, driver
from dask_devctx.errors import DeviceScopeError, DriverError
from tests.cuda.test_scope import current


@pytest.fixture
def own(backend):
    with closing(Context(0)) as context:
        yield context


# -- owned


def test_owned(own):
    assert own.handle
    assert own.device is Device(0)
    assert not own.is_primary
    assert own.flags == ContextFlags.SCHED_AUTO
    assert current() == 0  # making it left the thread as it was
    assert not Device(0).primary_context.is_active  # nor does it make the primary one
    assert hex(own.handle) in repr(own)
    assert "owned" in repr(own)
    with Device(0):
        before = current()
        own.synchronize()
        with closing(Context(0)):
            assert current() == before
    own.set_current()
    assert own.is_current
    assert Context.current() is own
    assert Device.current() is own.device
    with ThreadPoolExecutor(1) as thread:
        seen = thread.submit(lambda: (own.is_current, Context.current())).result()
    assert seen == (False, None)
    driver.backend().calls.set_current(0)
    assert not own.is_current


def test_flags(machine):
    with closing(Context(0, ContextFlags.SCHED_SPIN | ContextFlags.MAP_HOST)) as own:
        assert own.flags == ContextFlags.SCHED_SPIN | ContextFlags.MAP_HOST
        own.flags = ContextFlags.SCHED_YIELD | ContextFlags.SYNC_MEMOPS
        assert own.flags == ContextFlags.SCHED_YIELD | ContextFlags.SYNC_MEMOPS


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        (ContextFlags(7), DriverError, "CUDA_ERROR_INVALID_VALUE"),
        ("spin", TypeError, r"ContextFlags.SCHED_SPIN, joined by \|; got 'spin' of type str"),
        (1, TypeError, "got 1 of type int"),
    ],
)
def test_flags_that_cannot_be(machine, flags, kind, message):
    with pytest.raises(kind, match=message):
        Context(0, flags)
    with closing(Context(0)) as own, pytest.raises(kind, match=message):
        own.flags = flags
    with pytest.raises(kind, match=message):
        Device(0).primary_context.flags = flags
    assert current() == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [(ContextFlags, types.CUctx_flags, "CU_CTX_"), (Limit, types.CUlimit, "CU_LIMIT_")],
)
def test_enumerations_are_the_drivers(ours, theirs, prefix):
    named = {f"{prefix}{name}": member.value for name, member in ours.__members__.items()}
    bounds = {"CU_LIMIT_MAX", "CU_CTX_SCHED_MASK", "CU_CTX_FLAGS_MASK"}
    older = {"CU_CTX_BLOCKING_SYNC"}  # which some bindings keep as well
    for member in theirs:  # older bindings have fewer
        assert member.name in bounds | older or named[member.name] == member.value


# -- closing


def test_close(backend):
    own = Context(0)
    own.set_current()
    own.close()
    assert current() == 0
    own.close()  # twice does nothing
    assert own.handle == 0
    assert not own.is_current
    assert not own.is_primary
    assert "closed" in repr(own)
    for use in (
        own.__enter__,
        own.set_current,
        own.synchronize,
        lambda: own.flags,
        lambda: own.limits[Limit.STACK_SIZE],
    ):
        with pytest.raises(DeviceScopeError, match="this context was closed"):
            use()
    assert current() == 0


def test_collected_unclosed(machine):
    own = Context(0)
    handle = own.handle
    said = "was never closed: it lives, with its memory, until the process ends"
    with pytest.warns(ResourceWarning, match=said):
        del own
        gc.collect()
    assert machine.faults.calls["cuCtxDestroy"] == 0  # it may be current on some thread
    driver.backend().calls.destroy(handle)


# -- the current one


def test_current_is_borrowed(backend):
    calls = backend.driver()
    handle = calls.create(0, 0)
    borrowed = Context.current()
    assert borrowed.handle == handle
    assert borrowed.is_current
    assert not borrowed.is_primary
    assert borrowed == Context.current()
    assert hash(borrowed) == hash(Context.current())
    assert "borrowed" in repr(borrowed)
    assert borrowed.flags == ContextFlags.SCHED_AUTO
    assert borrowed.limits[Limit.STACK_SIZE] > 0
    borrowed.synchronize()
    with pytest.raises(DeviceScopeError, match="the context belongs to somebody else"):
        borrowed.close()
    calls.set_current(0)
    with borrowed:
        assert current() == handle
    calls.destroy(handle)
    for use in (borrowed.__enter__, borrowed.set_current, borrowed.synchronize):
        with pytest.raises(DeviceScopeError, match="destroyed by somebody else"):
            use()
    assert not borrowed.is_current
    del borrowed
    gc.collect()  # a borrower warns of nothing


# -- the primary one


def test_primary(backend):
    primary = Device(0).primary_context
    assert isinstance(primary, PrimaryContext)
    assert isinstance(primary, Context)
    assert primary is Device(0).primary_context
    assert primary.device is Device(0)
    assert primary.is_primary
    assert not primary.is_active
    assert not primary.is_current
    assert not primary.is_active  # asking created nothing
    with primary:
        assert primary.is_active
        assert primary.is_current
        assert Device.current() is Device(0)
        Device(1).primary_context.set_current()  # which nothing has retained yet
        assert Device.current() is Device(1)
    assert primary.is_active  # it stays, for the next scope
    assert current() == 0
    assert primary.limits[Limit.STACK_SIZE] > 0
    assert primary.run(current) == primary.handle
    primary.synchronize()
    assert repr(Device(0)) in repr(primary)


def test_primary_flags(backend):
    primary = Device(0).primary_context
    primary.flags = ContextFlags.SCHED_BLOCKING_SYNC
    assert primary.flags == ContextFlags.SCHED_BLOCKING_SYNC
    assert not primary.is_active
    with primary:
        assert primary.flags == ContextFlags.SCHED_BLOCKING_SYNC
        primary.flags = ContextFlags.SCHED_YIELD
        assert primary.flags == ContextFlags.SCHED_YIELD


# -- limits


def test_limits(own):
    limits = own.limits
    assert limits[Limit.STACK_SIZE] == 1024
    limits[Limit.STACK_SIZE] = 2048
    assert limits[Limit.STACK_SIZE] == 2048
    for limit in (Limit.PRINTF_FIFO_SIZE, Limit.MALLOC_HEAP_SIZE):
        value = limits[limit]
        limits[limit] = 2 * value
        assert limits[limit] == 2 * value
    for wrong in ("STACK_SIZE", 99, None):
        for use in (limits.__getitem__, lambda one: limits.__setitem__(one, 1)):
            with pytest.raises(ValueError, match=f"{wrong!r} is not a valid Limit"):
                use(wrong)
    with pytest.raises(TypeError):
        dict(limits)
    assert current() == 0


def test_limits_of_the_device_only(machine):
    with closing(Context(0)) as own:
        # The bindings, the driver or the device have no such limit.
        for limit in (Limit.DEV_RUNTIME_SYNC_DEPTH, Limit.PER_BLOCK_MEMORY_SIZE):
            with pytest.raises(DriverError, match="CUDA_ERROR_UNSUPPORTED_LIMIT"):
                own.limits[limit]
