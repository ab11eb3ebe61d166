"""The options of the plugin: one field for each, with its check.

A new option is a field of :class:`Options` with its paragraph, a key in ``devctx.yaml`` and in
``devctx-schema.yaml``, and a row in ``docs/configuration.md``. The plugin, the cluster and the
command line take it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, Literal

from dask.typing import no_default

from dask_devctx import config
from dask_devctx.config.checks import (
    Check,
    configured,
    fraction,
    function,
    key_of,
    list_of_devices,
    memory_limit,
    memory_size,
    names_of,
    one_of,
    path,
    share_of_memory,
    whole_number,
)
from dask_devctx.config.packages import LIBRARIES, allocators_agree

# A device's tasks run on the device's own threads. So a worker's `nthreads` only limits how many
# tasks dask sends it ahead. If it is small, threads wait for the scheduler; if it is large, results
# pile up before they are used.
LOOK_AHEAD: Final = 8


def _option(check: Check, *, configured: bool = True, default: object = None) -> Any:
    """Return an optional field; if ``configured``, its default is the configuration's value."""
    return field(default=default, metadata={"check": check, "configured": configured})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the plugin, checked; the defaults come from the configuration.

    Parameters
    ----------
    devices
        The devices that a worker uses, each anything that :class:`~dask_devctx.Device` accepts;
        all that it sees by default.
    devices_per_worker
        How many of them each worker takes for itself. None: all that are free; the workers of one
        cluster share a machine's devices out evenly, also when one joins later.
    shared
        Whether workers may use the same devices. By default, no two processes of one machine and
        user do: see "Deployment" in the documentation. With True, ``devices_per_worker`` has no
        effect.
    tasks_per_device
        How many tasks run on a device at a time. Tasks that wait for each other must all have a
        place: see "Deployment" in the documentation.
    cpu_threads
        How many tasks without a device (``device=None``) run at a time. None: as many as the worker
        has CPUs, and up to ``nthreads`` while these tasks wait instead of compute.
    unannotated
        ``"assign"`` gives a task without a ``device`` annotation a device; ``"leave"`` leaves it on
        dask's own threads without one.
    move_inputs
        Whether a task's inputs that live on another device are copied to its own before it runs.
    replica_limit
        How much of each device's memory such copies may take, as a fraction.
    policy
        Chooses the device of a task that names none, given one :class:`~dask_devctx.Candidate` per
        device: see "Which device a task gets" in the documentation. By default the task goes where
        it starts soonest.
    synchronize
        Wait for the device before a task counts as done. This is slower. A failure then has fewer
        suspects, which run again.
    nvtx
        Whether each task has an NVTX range with its key, for Nsight Systems. This needs the package
        ``nvtx``.
    oom_retries
        How often a task that ran out of a device's memory is tried again, after memory was freed.
    ipc
        Whether values go to other workers of the machine by CUDA IPC. ``"auto"`` and True:
        wherever it works, with UCX too, which carries what goes between machines; False: never.
    ipc_staging
        How much of each device's memory values may take while they are sent: a fraction, which is
        at most a quarter of its ``device_memory_limit``, or bytes such as ``"2 GiB"``.
    device_memory_limit
        How much of each device's memory the values that dask keeps may take: ``"auto"`` for 0.8 of
        it, a fraction, bytes such as ``"12 GiB"``, 0 or None for no limit. Beyond it, values go to
        host memory, and come back before their tasks: see "Device memory" in the documentation.
    pool
        ``"cupy-async"``: CuPy allocates from CUDA's own asynchronous pools. None: CuPy's own pool,
        or RMM with ``rmm_allocator_external_lib_list``.
    rmm_pool_size
        The initial size of an RMM pool on each device: a fraction of its memory, bytes such as
        ``"30 GB"``, 0 or None for no pool.
    rmm_maximum_pool_size
        How large such a pool may become; by default it grows as long as there is memory.
    rmm_managed_memory
        Whether RMM allocates managed memory, which the driver moves between device and host.
    rmm_async
        Whether RMM uses CUDA's asynchronous allocator.
    rmm_release_threshold
        With ``rmm_async``: how much unused memory the allocator keeps when the device is
        synchronized; all of it by default.
    rmm_log_directory
        The directory where RMM logs each allocation, a file for each worker and device.
    rmm_track_allocations
        Whether RMM counts the bytes that are allocated, for dask's dashboard. This is slow.
    rmm_allocator_external_lib_list
        The libraries that allocate through RMM: some of ``"cupy"``, ``"torch"`` and ``"numba"``, as
        a list or as text with commas.
    enable_cudf_spill
        Whether cuDF moves its own data to host memory when a device is full.
    cudf_spill_stats
        How much cuDF records of that: 0, 1 or 2.
    pre_import
        Modules that a worker imports before its first task, as a list or as text with commas.

    Raises
    ------
    TypeError
        ``devices`` is not a sequence, or ``policy`` not a function of one argument.
    ValueError
        An option, or the configuration that stands in for it, is out of range.
    """

    devices: Sequence[object] | None = _option(list_of_devices)
    devices_per_worker: int | None = _option(whole_number(1))
    shared: bool = _option(one_of(True, False))
    tasks_per_device: int = _option(whole_number(1))
    cpu_threads: int | None = _option(whole_number(1))
    unannotated: Literal["assign", "leave"] = _option(one_of("assign", "leave"))
    move_inputs: bool = _option(one_of(True, False))
    replica_limit: float = _option(fraction)
    policy: Callable[[Sequence[Any]], Any] | None = _option(  # noqa: RUF009 - makes a field
        function, configured=False
    )
    synchronize: bool = _option(one_of(True, False))
    nvtx: bool = _option(one_of(True, False))
    oom_retries: int = _option(whole_number(0))
    ipc: Literal["auto"] | bool = _option(one_of("auto", True, False))
    ipc_staging: float = _option(share_of_memory)
    # None means that there is no limit, so the value for "not given" is another one.
    device_memory_limit: float | str | None = _option(memory_limit, default=no_default)
    pool: Literal["cupy-async"] | None = _option(one_of("cupy-async"))
    rmm_pool_size: float | str | None = _option(memory_size)
    rmm_maximum_pool_size: float | str | None = _option(memory_size)
    rmm_managed_memory: bool = _option(one_of(True, False))
    rmm_async: bool = _option(one_of(True, False))
    rmm_release_threshold: float | str | None = _option(memory_size)
    rmm_log_directory: str | None = _option(path)
    rmm_track_allocations: bool = _option(one_of(True, False))
    rmm_allocator_external_lib_list: Sequence[str] | str | None = _option(names_of(*LIBRARIES))
    enable_cudf_spill: bool = _option(one_of(True, False))
    cudf_spill_stats: int = _option(whole_number(0))
    pre_import: Sequence[str] | str | None = _option(names_of())

    def __post_init__(self) -> None:
        for one in fields(self):
            value, default = getattr(self, one.name), None
            check: Check = one.metadata["check"]
            if one.metadata["configured"]:
                if value is one.default:
                    value = config.get(key_of(one.name))
                    check = partial(configured, check)
                default = config.defaults["devctx"][key_of(one.name)]
            if value is not None or default is not None:
                value = check(one.name, value)
            object.__setattr__(self, one.name, value)
        allocators_agree(self)


OPTION_NAMES: Final = tuple(one.name for one in fields(Options))
# The keys of the configuration that stand in for options.
CONFIGURED: Final = tuple(key_of(one.name) for one in fields(Options) if one.metadata["configured"])


def remembered_tasks() -> int:
    """Return how many tasks a worker remembers, by the configuration of its own process.

    Raises
    ------
    ValueError
        It is not a whole number.
    """
    count: Any = configured(whole_number(0), "history", config.get("history"))
    return int(count)
