"""Scopes and contexts on real GPUs, with the runtime, torch, CuPy, Numba and JAX: none is lost.

Each test runs in a fresh process, because a library's first use in a process matters. Libraries
may leave a context behind on a thread that had none. The tests assert that each of our scopes gives
back the very context that it found, and that theirs inside ours come back to it.
"""

# ruff: noqa: F821 - the functions run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import importlib.util
import itertools

import pytest

pytestmark = pytest.mark.gpu(count=2)

LIBRARIES = ("torch", "cupy", "numba")
REAL = {"DASK_DEVCTX__SIMULATED_DEVICES": None, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def need(*modules):
    for module in modules:
        try:
            found = module == "runtime" or importlib.util.find_spec(module)
        except ModuleNotFoundError:  # a parent of it is missing
            found = None
        if not found:
            pytest.skip(f"{module} is not installed")


# -- what the processes know beside their function


def current():
    return int(ok(types.cuCtxGetCurrent()))


def scope_of(name, ordinal):
    if name == "torch":
        import torch

        return torch.cuda.device(ordinal)
    if name == "cupy":
        import cupy

        return cupy.cuda.Device(ordinal)
    from numba import cuda

    return cuda.gpus[ordinal]


def work(name):
    """Allocate with a library where it thinks it is; return the device of the memory."""
    if name == "torch":
        import torch

        kept = torch.ones(1024, device="cuda")
        pointer = kept.data_ptr()
        assert kept.sum().item() == 1024
    elif name == "cupy":
        import cupy

        kept = cupy.ones(1024)
        pointer = kept.data.ptr
        assert float(kept.sum()) == 1024
    else:
        import numpy
        from numba import cuda

        kept = cuda.to_device(numpy.ones(1024))
        pointer = kept.device_ctypes_pointer.value
    # cuda.bindings 13.3 answers 0 for every device
    ordinal, address = ctypes.c_int(-1), ctypes.c_void_p(pointer)
    kind = int(types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    libcuda = ctypes.CDLL("libcuda.so.1")
    assert libcuda.cuPointerGetAttribute(ctypes.byref(ordinal), kind, address) == 0
    return ordinal.value


BESIDE = (current, scope_of, work)


# -- what they run


def nested(first, second, third):
    """Ours around theirs, then theirs around ours, three of each: at each level, exact."""
    import contextlib
    import importlib

    from dask_devctx import Device, devices

    for name in {first, second, third} | {"cuda.bindings.driver"}:
        importlib.import_module(name)
    ok(types.cuInit(0))  # until then the driver does not say what is current

    @contextlib.contextmanager
    def ours(ordinal):
        before = current()
        with Device(ordinal) as device:
            mine = current()
            assert mine == device.primary_context.handle
            yield
            assert current() == mine, "a library did not come back to our context"
        assert current() == before, "our scope did not restore the caller's context"

    @contextlib.contextmanager
    def theirs(name, ordinal):
        with scope_of(name, ordinal):
            for last in (False, True):
                assert Device.current() is Device(ordinal), (name, ordinal, Device.current())
                assert (where := work(name)) == ordinal, (name, ordinal, where, Device.current())
                if not last:
                    yield

    if "numba" in (first, second, third):
        from numba import cuda

        # The first time that Numba meets a GPU it takes the caller's context off the thread's stack
        # (numba-cuda 0.30), where there is one: let it be while there is none.
        for ordinal in (0, 1):
            cuda.gpus[ordinal].get_primary_context()

    primaries = {}
    assert current() == 0
    for a, b in ((0, 1), (1, 0), (1, 1), (0, 0)):
        with ours(a):
            assert work(first) == a, first
            with theirs(first, b), ours(a), theirs(second, b), ours(a), theirs(third, b), ours(b):
                assert Device.current() is Device(b)
            assert Device.current() is Device(a)
        assert current() == 0
        # Theirs around ours, on a thread that has a context. Without one CuPy launches on nothing
        # where its pool has memory already, and torch goes on with the device that it was on.
        primaries[a] = mine = Device(a).primary_context.handle
        ok(types.cuCtxSetCurrent(types.CUcontext(mine)))
        with theirs(first, b), ours(a), theirs(second, b), ours(a), theirs(third, b), ours(a):
            assert Device.current() is Device(a)
        assert current() == mine, "theirs did not come back to the caller's context"
        ok(types.cuCtxSetCurrent(types.CUcontext(0)))
    assert len(set(primaries.values())) == 2
    for device in devices()[2:]:
        assert not device.primary_context.is_active, device


def unused_gpus_stay_untouched(libraries, on_a_thread):
    from concurrent.futures import ThreadPoolExecutor

    from dask_devctx import Device, devices

    def use():
        for name in libraries:
            with Device(1):
                handle = current()
                if name != "numba":
                    assert work(name) == 1
                with scope_of(name, 1):
                    assert work(name) == 1
                assert current() == handle, name
            assert current() == 0, name
            for device in devices():
                active = device.primary_context.is_active
                assert active == (device.device_id == 1), (name, device, active)

    if on_a_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(use).result()
    else:
        use()


def not_primary(name):
    """A caller's own context, with a library at work in our scope: it comes back exactly."""
    from contextlib import closing

    from dask_devctx import Context, Device

    with closing(Context(0)) as own, own:
        with Device(1):
            if name != "numba":
                with scope_of(name, 0):
                    work(name)
                work(name)
            else:
                with scope_of(name, 1):
                    work(name)
            assert Device.current() is Device(1)
        assert current() == own.handle
    assert current() == 0


def one_device(name):
    """Their device is ours, and ours is a number to them."""
    from dask_devctx import Device

    one = Device(1)
    if name == "runtime":
        from cuda.bindings import runtime

        assert int(runtime.cudaSetDevice(int(one))[0]) == 0
        found = []
    elif name == "torch":
        import torch

        assert torch.device("cuda", int(one)).index == 1
        torch.cuda.set_device(int(one))
        found = [torch.device("cuda"), torch.device("cuda:1"), torch.ones(1, device="cuda").device]
    elif name == "cupy":
        import cupy

        cupy.cuda.Device(one).use()
        found = [cupy.cuda.Device(1), cupy.ones(1).device]
    elif name == "numba":
        from numba import cuda

        cuda.select_device(one)
        found = [cuda.gpus[1], cuda.current_context().device]
    elif name == "jax":
        import jax

        assert jax.devices("gpu")[one].local_hardware_id == 1
        one.set_current()  # JAX leaves its last device current
        found = [device for device in jax.devices("gpu") if device.local_hardware_id == 1]
    else:
        try:
            from cuda.core import Device as Theirs
        except ImportError:
            from cuda.core.experimental import Device as Theirs
        one.set_current()
        assert str(Theirs(1).uuid) in one.uuid
        found = [Theirs(1)]
    for device in found:
        assert Device(device) is one, device
    assert Device.current() is one


def agrees(library):
    """A library and we name the same device: inside, outside and after scopes, on threads too."""
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import closing

    from cuda.bindings import runtime

    from dask_devctx import Context, Device, on_device

    if library == "runtime":
        assert ok(runtime.cudaGetDevice()) == 0

        def where():
            return ok(runtime.cudaGetDevice())
    elif library == "torch":
        import torch

        where = torch.cuda.current_device
    else:
        import cupy

        where = cupy.cuda.runtime.getDevice

    with Device(1):
        assert where() == 1
        with closing(Context(0)) as own:
            for scope in (Device(0), Device(0).synchronized(), own):
                with scope:
                    assert where() == 0
                assert where() == 1
        pointer = ok(runtime.cudaMalloc(1 << 20))
        assert ok(runtime.cudaPointerGetAttributes(pointer)).device == 1
        ok(runtime.cudaFree(pointer))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(on_device(1)(where)).result() == 1
    assert current() == 0
    if library == "runtime":  # the others may remember a device themselves
        assert where() == 0  # its word for "nothing is current"
        assert current() == 0  # asking made nothing current
    Device(1).set_current()
    assert where() == 1
    Device.unset_current()
    assert current() == 0


def separate_memory():
    """A context's memory goes with it, and a pointer of it is no other's."""
    from contextlib import closing

    from dask_devctx import Context, Device

    with closing(Context(0)) as own, own:
        pointer = ok(types.cuMemAlloc(1 << 20))
        kind = types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
        assert int(ok(types.cuPointerGetAttribute(kind, pointer))) == own.handle
        assert names(types.cuMemGetAddressRange(pointer)) == ["SUCCESS"]
    with Device(0):
        assert names(types.cuMemGetAddressRange(pointer)) == ["NOT_FOUND"]


# -- the tests


@pytest.mark.parametrize("order", list(itertools.permutations(LIBRARIES)), ids="-".join)
def test_nested_at_three_levels(order, child):
    need(*order)
    child(nested, *order, env=REAL, beside=BESIDE)


@pytest.mark.parametrize("on_a_thread", [False, True], ids=["main-thread", "fresh-thread"])
@pytest.mark.parametrize("libraries", [*((name,) for name in LIBRARIES), LIBRARIES], ids="-".join)
def test_unused_gpus_have_no_context(libraries, on_a_thread, child):
    need(*libraries)
    child(unused_gpus_stay_untouched, libraries, on_a_thread, env=REAL, beside=BESIDE)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        *((not_primary, name) for name in LIBRARIES),
        *((one_device, name) for name in ("runtime", *LIBRARIES, "jax", "cuda.core")),
        *((agrees, name) for name in ("runtime", "torch", "cupy")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_with_each_library(function, argument, child):
    need(argument)
    child(function, argument, env=REAL, beside=BESIDE)


@pytest.mark.gpu(count=1)
def test_contexts_have_separate_memory(child):
    child(separate_memory, env=REAL)
