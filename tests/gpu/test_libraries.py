"""With torch, CuPy and Numba in one process, on real GPUs: nobody's device is lost.

Each test runs in a fresh process, because what a library finds on its first use matters. What the
libraries leave behind on a thread that had no context is theirs; what is asserted is that each of
our scopes gives back the very context that it found, and that theirs inside ours come back to it.
"""

# ruff: noqa: F821 - the functions run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import importlib.util
import itertools

import pytest

pytestmark = pytest.mark.gpu(count=2)

LIBRARIES = ("torch", "cupy", "numba")
REAL = {"DASK_DEVCTX__SIMULATED_DEVICES": None}


def need(*modules):
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # a parent of it is missing
            found = None
        if found is None:
            pytest.skip(f"{module} is not installed")


def nested(first, second, third):
    """Ours around theirs, then theirs around ours, three of each: at each level, exact."""
    import contextlib
    import ctypes
    import importlib

    from dask_devctx import Device, devices

    libcuda = ctypes.CDLL("libcuda.so.1")
    DEVICE_ORDINAL = int(types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)

    for name in {first, second, third} | {"cuda.bindings.driver"}:
        importlib.import_module(name)

    ok(types.cuInit(0))  # until then the driver does not say what is current

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
        ordinal = ctypes.c_int(-1)  # cuda.bindings 13.3 answers 0 for every device
        address = ctypes.c_void_p(pointer)
        assert libcuda.cuPointerGetAttribute(ctypes.byref(ordinal), DEVICE_ORDINAL, address) == 0
        return ordinal.value

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
            assert Device.current() is Device(ordinal), (name, ordinal, Device.current())
            assert (where := work(name)) == ordinal, (name, ordinal, where, Device.current())
            yield
            assert Device.current() is Device(ordinal), (name, ordinal, Device.current())
            assert (where := work(name)) == ordinal, (name, ordinal, where, Device.current())

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


@pytest.mark.parametrize("order", list(itertools.permutations(LIBRARIES)), ids="-".join)
def test_nested_at_three_levels(order, child):
    need(*order)
    child(nested, *order, env=REAL)


def unused_gpus_stay_untouched(names_of_libraries, on_a_thread):
    import threading

    from dask_devctx import Device, devices

    def use():
        for name in names_of_libraries:
            with Device(1):
                handle = int(ok(types.cuCtxGetCurrent()))
                if name == "torch":
                    import torch

                    torch.ones(8, device="cuda")
                    with torch.cuda.device(1):
                        torch.ones(8, device="cuda")
                elif name == "cupy":
                    import cupy

                    cupy.ones(8)
                    with cupy.cuda.Device(1):
                        cupy.ones(8)
                else:
                    import numpy
                    from numba import cuda

                    with cuda.gpus[1]:
                        cuda.to_device(numpy.ones(8))
                assert int(ok(types.cuCtxGetCurrent())) == handle, name
            assert int(ok(types.cuCtxGetCurrent())) == 0, name
            for device in devices():
                active = device.primary_context.is_active
                assert active == (device.device_id == 1), (name, device, active)

    problems = []

    def caught():
        try:
            use()
        except BaseException as error:
            problems.append(error)

    if on_a_thread:
        thread = threading.Thread(target=caught)
        thread.start()
        thread.join()
        if problems:
            raise problems[0]
    else:
        use()


@pytest.mark.parametrize("on_a_thread", [False, True], ids=["main-thread", "fresh-thread"])
@pytest.mark.parametrize("libraries", [*((name,) for name in LIBRARIES), LIBRARIES], ids="-".join)
def test_unused_gpus_have_no_context(libraries, on_a_thread, child):
    need(*libraries)
    child(unused_gpus_stay_untouched, libraries, on_a_thread, env=REAL)


def not_primary(name):
    """A caller's own context, with a library at work in our scope: it comes back exactly."""
    from contextlib import closing

    from dask_devctx import Device
    from dask_devctx.cuda.context import Context

    with closing(Context(0)) as own, own:
        with Device(1):
            if name == "torch":
                import torch

                with torch.cuda.device(0):
                    torch.ones(8, device="cuda")
                torch.ones(8, device="cuda")
            elif name == "cupy":
                import cupy

                with cupy.cuda.Device(0):
                    cupy.ones(8)
                cupy.ones(8)
            else:
                import numpy
                from numba import cuda

                with cuda.gpus[1]:
                    cuda.to_device(numpy.ones(8))
            assert Device.current() is Device(1)
        assert int(ok(types.cuCtxGetCurrent())) == own.handle
    assert int(ok(types.cuCtxGetCurrent())) == 0


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_callers_own_context_is_restored(name, child):
    need(name)
    child(not_primary, name, env=REAL)


def same_device(name):
    from dask_devctx import Device

    one = Device(1)
    if name == "torch":
        import torch

        with one:
            assert torch.cuda.current_device() == 1
            found = [torch.device("cuda:1"), torch.ones(1, device="cuda").device]
            found += [torch.device("cuda")]
            assert all(Device(device) is one for device in found), found
        return
    if name == "cupy":
        import cupy

        with one:
            assert cupy.cuda.runtime.getDevice() == 1
            found = [cupy.cuda.Device(1), cupy.ones(1).device]
    elif name == "numba":
        from numba import cuda

        found = [cuda.gpus[1]]
        with one:
            found += [cuda.current_context().device]
    elif name == "jax":
        import jax

        found = [device for device in jax.devices("gpu") if device.local_hardware_id == 1]
        assert found
    else:
        try:
            from cuda.core import Device as Theirs
        except ImportError:
            from cuda.core.experimental import Device as Theirs
        found = [Theirs(1)]
        assert str(Theirs(1).uuid) in one.uuid
    for device in found:
        assert Device(device) is one, device


@pytest.mark.parametrize("name", ["torch", "cupy", "numba", "jax", "cuda.core"])
def test_their_device_is_ours(name, child):
    need(name)
    child(same_device, name, env={**REAL, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
