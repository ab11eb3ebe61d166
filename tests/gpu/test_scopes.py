"""Scopes and contexts on real GPUs: what the runtime and the libraries say, and own memory.

Each test runs in a fresh process: what a library or the runtime finds on its first use matters.
"""

# ruff: noqa: F821 - the functions run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.gpu(count=2)

REAL = {"DASK_DEVCTX__SIMULATED_DEVICES": None}


def agrees(library):
    """A library and we name the same device: inside, outside and after scopes, on threads too."""
    import threading

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
        with Device(0):
            assert where() == 0
        assert where() == 1
        pointer = ok(runtime.cudaMalloc(1 << 20))
        assert ok(runtime.cudaPointerGetAttributes(pointer)).device == 1
        ok(runtime.cudaFree(pointer))
        with Device(0).synchronized():
            assert where() == 0
        assert where() == 1
        seen = []
        thread = threading.Thread(target=lambda: seen.append(on_device(1)(where)()))
        thread.start()
        thread.join()
        assert seen == [1]
        with Context.temporary(0):
            assert where() == 0
        assert where() == 1
    assert int(ok(types.cuCtxGetCurrent())) == 0
    if library == "runtime":  # the others may remember a device themselves
        assert where() == 0  # its word for "nothing is current"
        assert int(ok(types.cuCtxGetCurrent())) == 0  # asking made nothing current
    Device(1).set_current()
    assert where() == 1
    Device.unset_current()
    assert int(ok(types.cuCtxGetCurrent())) == 0


def separate_memory():
    """A context's memory goes with it, and a pointer of it is no other's."""
    from dask_devctx import Context, Device

    with Context.temporary(0) as own:
        pointer = ok(types.cuMemAlloc(1 << 20))
        kind = types.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
        assert int(ok(types.cuPointerGetAttribute(kind, pointer))) == own.handle
        assert names(types.cuMemGetAddressRange(pointer)) == ["SUCCESS"]
    with Device(0):
        assert names(types.cuMemGetAddressRange(pointer)) == ["NOT_FOUND"]


def half_way(function):
    """A call on the way to a context is refused: it is destroyed, and the thread as before."""
    from dask_devctx import Context, Device, driver
    from dask_devctx.errors import DriverError

    backend = driver.backend()
    calls = backend.driver()
    made = []
    create = calls.create

    def note(*args):
        made.append(create(*args))
        if function == "create":
            raise KeyboardInterrupt
        return made[-1]

    def refuse(*args):
        raise DriverError(function, "CUDA_ERROR_UNKNOWN", 999)

    for outer in (None, 1):
        if outer is not None:
            Device(outer).set_current()
        before = backend.current_context()
        calls.create = note
        if function != "create":
            setattr(calls, function, refuse)
        try:
            Context(0)
        except (DriverError, KeyboardInterrupt):
            pass
        else:
            raise AssertionError("it was made")
        del calls.create
        if function != "create":
            delattr(calls, function)
        assert backend.current_context() == before
        assert calls.context_id(made.pop()) is None  # destroyed
    Device.unset_current()


def a_number(library):
    """A device where a library wants a number."""
    from dask_devctx import Device

    one = Device(1)
    if library == "runtime":
        from cuda.bindings import runtime

        assert int(runtime.cudaSetDevice(int(one))[0]) == 0
    elif library == "torch":
        import torch

        assert torch.device("cuda", int(one)).index == 1
        torch.cuda.set_device(int(one))
    elif library == "cupy":
        import cupy

        cupy.cuda.Device(one).use()
    elif library == "numba":
        from numba import cuda

        cuda.select_device(one)
    else:
        import jax

        assert jax.devices("gpu")[one].local_hardware_id == 1
        return
    assert Device.current() is one


def to_the_host(library):
    """From a device to host memory, while another device is current."""
    import numpy as np

    from dask_devctx import Device, device_of, to_device

    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    with Device(1):
        if library == "torch":
            import torch

            there = torch.tensor(values, device="cuda:1", requires_grad=True)
            module = torch.nn.Linear(3, 2, device="cuda:1")
            moved = to_device([module, there], "cpu")[0]
            assert {one.device.type for one in moved.parameters()} == {"cpu"}
            assert torch.equal(moved.weight, module.weight.cpu())
            assert to_device(there, torch.device("cpu")).requires_grad
        elif library == "cupy":
            import cupy

            there = cupy.asarray(values)
        elif library == "numba":
            from numba import cuda

            with cuda.gpus[1]:
                there = cuda.to_device(values)
        else:
            import jax

            there = jax.device_put(values, jax.devices("gpu")[1])
    assert device_of(there) is Device(1)
    with Device(0):
        host = to_device({"x": there}, "cpu")["x"]
        assert Device.current() is Device(0)
    assert device_of(host) is None
    if library == "torch":
        assert host.requires_grad
        host = host.detach().numpy()
    assert type(host) is np.ndarray
    assert (host == values).all()
    if library == "cupy":
        assert host.flags.f_contiguous


def need(library):
    try:
        found = library == "runtime" or importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize("library", ["runtime", "torch", "cupy", "numba", "jax"])
def test_a_device_as_a_number(library, child):
    need(library)
    child(a_number, library, env=REAL)


@pytest.mark.parametrize("library", ["torch", "cupy", "numba", "jax"])
def test_to_the_host(library, child):
    need(library)
    child(to_the_host, library, env=REAL)


@pytest.mark.parametrize("library", ["runtime", "torch", "cupy"])
def test_the_runtime_agrees_inside_outside_and_after(library, child):
    need(library)
    child(agrees, library, env=REAL)


def test_contexts_have_separate_memory(child):
    child(separate_memory, env=REAL)


@pytest.mark.parametrize("function", ["create", "set_current", "context_id"])
def test_a_context_that_fails_half_way(function, child):
    child(half_way, function, env=REAL)
