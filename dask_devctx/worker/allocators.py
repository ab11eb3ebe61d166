"""The allocators of a worker's devices: RMM's resources, and the libraries that use them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import distributed.diagnostics.rmm
from distributed import Worker

from dask_devctx.config.options import Options, require_packages, rmm_options
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.on_device import on_device
from dask_devctx.dask_internals.worker import metric, wrapped_handler
from dask_devctx.worker.values.accounting import limit_nbytes

# RMM allocates in units of this size, and refuses other sizes of a pool.
_ALIGNMENT_NBYTES = 256
_SIZES = ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold")

_NO_LIMIT_NBYTES = 2**64 - 1

# The libraries of this process that allocate through RMM for good.
_lasting: set[str] = set()


@contextmanager
def allocating(worker: Worker, devices: Sequence[Device], options: Options) -> Iterator[None]:
    """While it is open, memory on a worker's devices is allocated as the options say."""
    # When it closes, RMM has its earlier resources and CuPy its earlier allocator. Memory that was
    # allocated meanwhile stays valid: it keeps its resource. Torch and Numba cannot change their
    # allocator later, so they continue to allocate through RMM, with the earlier resources.
    require_packages(options)
    with ExitStack() as steps:
        if rmm_options(options):
            for device in devices:
                _use_rmm(steps, device, options, worker.name)
            steps.enter_context(metric(worker, "rmm", partial(_rmm_metric, devices)))
            if len(devices) == 1:  # RMM's functions in client.run ask for the current resource
                steps.enter_context(wrapped_handler(worker, "run", on_device(devices[0])))
        for library in options.rmm_allocator_external_lib_list or ():
            _use_rmm_in(steps, library)
        if options.allocator == "cupy-async":
            _use_cupy_async(steps, devices)
        if options.enable_cudf_spill:
            _use_cudf_spilling(steps, devices[0], options.cudf_spill_stats)
        yield


# -- RMM


def _use_rmm(steps: ExitStack, device: Device, options: Options, worker_name: object) -> None:
    """Let RMM allocate on a device from another resource."""
    mr, number = import_module("rmm.mr"), device.device_id
    with device:  # a resource belongs to the device that is current
        before = mr.get_per_device_resource(number)
        mr.set_per_device_resource(number, _resource(mr, device, options, worker_name))
    steps.callback(mr.set_per_device_resource, number, before)


def _resource(mr: Any, device: Device, options: Options, worker_name: object) -> Any:
    sizes = (limit_nbytes(device, getattr(options, name)) for name in _SIZES)
    size, maximum, threshold = (n and n // _ALIGNMENT_NBYTES * _ALIGNMENT_NBYTES for n in sizes)
    if options.rmm_async:
        resource = mr.CudaAsyncMemoryResource(initial_pool_size=size, release_threshold=threshold)
        if maximum is not None:
            resource = mr.LimitingResourceAdaptor(resource, allocation_limit=maximum)
    else:
        managed = options.rmm_managed_memory
        resource = mr.ManagedMemoryResource() if managed else mr.CudaMemoryResource()
        if size is not None:
            resource = mr.PoolMemoryResource(
                resource, initial_pool_size=size, maximum_pool_size=maximum
            )
    if options.rmm_log_directory is not None:
        os.makedirs(options.rmm_log_directory, exist_ok=True)
        name = f"rmm_log_{str(worker_name).rpartition('/')[2]}.txt"  # RMM adds the device
        path = os.path.join(options.rmm_log_directory, name)
        resource = mr.LoggingResourceAdaptor(resource, log_file_name=path)
    if options.rmm_track_allocations:
        resource = mr.TrackingResourceAdaptor(resource)
    return resource


def _rmm_metric(devices: Sequence[Device], worker: Worker) -> dict[str, int]:
    """Return RMM's bytes on the worker's devices, for the dashboard."""
    # dask's own metric has those of the device that is current on its thread: of CUDA's first.
    sums: Counter[str] = Counter()
    for device in devices:
        with device:
            sums.update(distributed.diagnostics.rmm.real_time())
    return dict(sums)


# -- libraries


def _use_rmm_in(steps: ExitStack, library: str) -> None:
    """Let a library allocate through RMM; torch and Numba go on for good."""
    allocators = import_module(f"rmm.allocators.{library}")
    if library == "cupy":
        _use_in_cupy(steps, allocators.rmm_cupy_allocator)
    elif library not in _lasting:
        if library == "torch":
            memory = import_module("torch").cuda.memory
            memory.change_current_allocator(allocators.rmm_torch_allocator)
        else:
            import_module("numba.cuda").set_memory_manager(allocators.RMMNumbaManager)
        _lasting.add(library)


def _use_in_cupy(steps: ExitStack, allocator: Callable[[int], Any]) -> None:
    """Let CuPy use an allocator; in the end, one that other code has set meanwhile stays."""
    cuda = import_module("cupy").cuda
    before = cuda.get_allocator()
    cuda.set_allocator(allocator)

    @steps.callback
    def restore() -> None:
        if cuda.get_allocator() == allocator:
            cuda.set_allocator(before)


def _use_cupy_async(steps: ExitStack, devices: Sequence[Device]) -> None:
    """Let CuPy allocate from each device's own asynchronous pool."""
    # By default, the driver releases all unused memory at each synchronization. The pools of the
    # worker's devices keep it, as CuPy's own pool does: cudaMemPoolAttrReleaseThreshold.
    # `cupy.cuda.MemoryAsyncPool` is not used: it creates a context on each visible device.
    cuda = import_module("cupy").cuda
    runtime = cuda.runtime
    threshold = runtime.cudaMemPoolAttrReleaseThreshold
    for device in devices:
        pool = runtime.deviceGetDefaultMemPool(device.device_id)
        before = runtime.memPoolGetAttribute(pool, threshold)
        runtime.memPoolSetAttribute(pool, threshold, _NO_LIMIT_NBYTES)
        steps.callback(runtime.memPoolTrimTo, pool, 0)
        steps.callback(runtime.memPoolSetAttribute, pool, threshold, before)
    _use_in_cupy(steps, cuda.malloc_async)


def _use_cudf_spilling(steps: ExitStack, device: Device, statistics: int) -> None:
    """Let cuDF spill; its resource is a part of the present one of its device."""
    cudf = import_module("cudf")
    with device:
        for name, value in {"spill": True, "spill_stats": statistics}.items():
            steps.callback(cudf.set_option, name, cudf.get_option(name))
            cudf.set_option(name, value)
