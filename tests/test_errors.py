"""Every error tells its fields, and keeps them on the way to another process."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle

import cloudpickle
import pytest

import dask_devctx
from dask_devctx import errors

CASES = {
    errors.DevctxError("why"): "why",
    errors.DriverError(
        "cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", 2, "out of memory"
    ): "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory",
    errors.DeviceMemoryError(
        "cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", 2, "", 300_000_000
    ): "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2) (286.1 MiB asked for)",
    errors.DeviceFailedError(
        "cuda:1", "GPU-b", "CUDA_ERROR_ILLEGAL_ADDRESS", 700, ["x on cuda:1"]
    ): "cuda:1 (GPU-b) failed with CUDA_ERROR_ILLEGAL_ADDRESS (700). No GPU can be used in this "
    "process any more: the worker ends, and dask computes its results again. x on cuda:1 "
    "caused it. Nothing else has run since the device was last seen healthy. Run its function "
    "under compute-sanitizer, which names the line of the kernel",
    errors.DeviceFailedError(
        "cuda:1", "GPU-b", "CUDA_ERROR_ASSERT", 710, ["x on cuda:0"], watched=True
    ): "cuda:1 (GPU-b) failed with CUDA_ERROR_ASSERT (710). No GPU can be used in this process "
    "any more: the worker ends, and dask computes its results again. x on cuda:0 caused it. It "
    "was watched: no other task ran in the process, and the worker waited for its devices "
    "before and after it. Run its function under compute-sanitizer, which names the line of "
    "the kernel",
    errors.DeviceFailedError(
        *("cuda:1", "GPU-b", "CUDA_ERROR_ASSERT", 710),
        ["x on cuda:0", "y on cuda:1"],
        worker="tcp://a:1",
        not_again="it says rerun=False",
    ): "cuda:1 (GPU-b) failed with CUDA_ERROR_ASSERT (710) on tcp://a:1. No GPU can be used in "
    "this process any more: the worker ends, and dask computes its results again. Any of these "
    "may have caused it: x on cuda:0; y on cuda:1. It is not run again: it says rerun=False",
    errors.DeviceOutOfMemoryError(
        "cuda:1", "GPU-b", 2**31, 2**30, 2**34, [(7, 2**33), (8, None), (9, 0)], 2, pid=7
    ): "cuda:1 (GPU-b) has not enough memory; the task ran 2 times (2.0 GiB more asked for; "
    "once it ended, 1.0 GiB of 16.0 GiB are free; held by this worker 8.0 GiB, process 8 an "
    "unknown amount). Make the task's parts smaller or its inputs fewer, or keep less there",
    errors.DeviceOutOfMemoryError(
        "cuda:1", "GPU-b", None, 2**34 - 2**28, 2**34
    ): "cuda:1 (GPU-b) has not enough memory; the task ran once (once it ended, 15.8 GiB of "
    "16.0 GiB are free). Make the task's parts smaller or its inputs fewer, run "
    "fewer tasks there at a time (tasks_per_device, if it is above 1), or keep less there",
    errors.DeviceOutOfMemoryError(
        "cuda:1", "GPU-b", 300_000_000, 2**26, 2**26
    ): "cuda:1 (GPU-b) has not enough memory; the task ran once (286.1 MiB more asked for; once "
    "it ended, 64.0 MiB of 64.0 MiB are free). The task asks for more than the "
    "device has: make the task's parts smaller",
    errors.DriverUnavailableError(
        "there is no driver", "Install it"
    ): "there is no driver. Install it",
    errors.no_device(
        7, ["cuda:0 (GPU-a)"], "0", "Ordinals go from 0 to 0"
    ): "no device 7. Ordinals go from 0 to 0. Available: cuda:0 (GPU-a); CUDA_VISIBLE_DEVICES is "
    "'0'",
    errors.no_device(
        "cuda:7", (), None, ""
    ): "no device 'cuda:7'. Available: none; CUDA_VISIBLE_DEVICES is not set",
    errors.VisibleDevicesError("it does not fit"): "it does not fit",
    errors.DeviceScopeError("was left too late"): "was left too late",
    errors.in_use(
        "this worker", 2, ["cuda:1"], {"cuda:0": "pid 1"}
    ): "this worker wants 2 devices for itself, and cuda:0 is held by pid 1. Free: cuda:1. For "
    "these, write devices=[1], lower n_workers or devices_per_worker, or leave them out. Or "
    "close the cluster that holds devices and is not needed, such as that of a notebook's "
    "earlier cell (cluster.close(), or client.shutdown()), or use the same devices: shared=True "
    "(--shared)",
    errors.in_use(
        "this worker", 2, ["cuda:1"], {}
    ): "this worker wants 2 devices for itself and there is 1. Lower devices_per_worker",
}


def same(error):
    return type(error), str(error), error.args, vars(error)


@pytest.mark.parametrize(("error", "message"), CASES.items(), ids=lambda case: repr(case)[:30])
def test_fields_message_and_pickle(error, message):
    assert str(error) == message
    named = type(error)._fields
    assert tuple(getattr(error, name) for name in named) == (error.args if named else ())
    error.add_note("on the way")
    importlib.import_module("distributed")  # has its own way of pickling exceptions
    for there in (pickle.dumps, cloudpickle.dumps):
        assert same(pickle.loads(there(error))) == same(error)
    assert same(copy.copy(error)) == same(error)


def test_every_class_is_tested():
    classes = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.DevctxError)
    }
    assert classes == {type(error) for error in CASES}
    assert all(cls.__doc__ for cls in classes)
    assert all(getattr(dask_devctx, cls.__name__) is cls for cls in classes)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("cuInit", "CUDA_ERROR_UNKNOWN"), {}),
        (("cuInit", "CUDA_ERROR_UNKNOWN", 999, "", "more"), {}),
        (("cuInit", "CUDA_ERROR_UNKNOWN", 999), {"reason": "no field"}),
    ],
)
def test_an_error_takes_its_fields_and_nothing_else(args, named):
    with pytest.raises(TypeError, match="DriverError takes function, status, code, description"):
        errors.DriverError(*args, **named)


def test_errors_are_those_of_python_too():
    assert issubclass(errors.DeviceNotFoundError, (LookupError, ValueError))
    assert issubclass(errors.DeviceOutOfMemoryError, MemoryError)
