"""The options of the plugin: one field for each, with its check.

A new option is a field of :class:`Options`, a key in ``devctx.yaml`` and in ``devctx-schema.yaml``,
and a row in ``docs/configuration.md``. Only an everyday one is also an argument of the plugin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, Literal, TypeVar

import psutil
from dask.typing import no_default
from distributed.system import MEMORY_LIMIT

from dask_devctx import config, driver
from dask_devctx.config.checks import (
    RMM,
    Check,
    allocator,
    configured,
    fraction,
    function,
    key_of,
    list_of_devices,
    memory_limit,
    names_of,
    one_of,
    share_of_memory,
    whole_number,
)
from dask_devctx.cuda import discovery
from dask_devctx.errors.base import nearest

# A device's tasks run on the device's own threads. So a worker's `nthreads` only limits how many
# tasks dask sends it ahead. If it is small, threads wait for the scheduler; if it is large, results
# pile up before they are used.
LOOK_AHEAD: Final = 8


def fair_memory(n_devices: int) -> int:
    """Return the bytes of host memory for workers that use so many of the machine's devices."""
    found = discovery.inventory(driver.backend())
    total = len(found.devices)
    if psutil.virtual_memory().total <= MEMORY_LIMIT:
        total += len(found.hidden)
    return int(MEMORY_LIMIT * n_devices) // max(total, n_devices, 1)


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
    policy
        Chooses the device of a task that names none, given one :class:`~dask_devctx.Candidate` per
        device: see "Which device a task gets" in the documentation. By default the task goes where
        it starts soonest.
    synchronize
        Wait for the device before a task counts as done. This is slower. A failure then has fewer
        suspects, which run again.
    oom_retries
        How often a task that ran out of a device's memory is tried again, after memory was freed.
    ipc
        Whether values go to other workers of the machine by CUDA IPC. ``"auto"`` and True:
        wherever it works, with UCX too, which carries what goes between machines; False: never.
    device_memory_limit
        How much of each device's memory the values that dask keeps may take: ``"auto"`` for 0.8 of
        it, a fraction, bytes such as ``"12 GiB"``, 0 or None for no limit. Beyond it, values go to
        host memory, and come back before their tasks: see "Device memory" in the documentation.
    allocator
        ``"cupy-async"``: CuPy allocates from CUDA's own asynchronous pools. Or RMM's settings, by
        dask-cuda's names without ``rmm_``, such as ``{"pool_size": 0.8}``: see "Device memory" in
        the documentation. None: the libraries' own allocators.

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
    policy: Callable[[Sequence[Any]], Any] | None = _option(  # noqa: RUF009 - makes a field
        function, configured=False
    )
    synchronize: bool = _option(one_of(True, False))
    oom_retries: int = _option(whole_number(0))
    ipc: Literal["auto"] | bool = _option(one_of("auto", True, False))
    # None means that there is no limit, so the value for "not given" is another one.
    device_memory_limit: float | str | None = _option(memory_limit, default=no_default)
    allocator: Literal["cupy-async"] | Mapping[str, Any] | None = _option(allocator)
    # Configuration only: no arguments of the plugin.
    replica_limit: float = _option(fraction)
    nvtx: bool = _option(one_of(True, False))
    ipc_staging: float = _option(share_of_memory)
    enable_cudf_spill: bool = _option(one_of(True, False))
    cudf_spill_stats: int = _option(whole_number(0))
    pre_import: Sequence[str] | str | None = _option(names_of())
    # RMM's settings, from `allocator`.
    rmm_pool_size: float | str | None = field(init=False)
    rmm_maximum_pool_size: float | str | None = field(init=False)
    rmm_managed_memory: bool = field(init=False)
    rmm_async: bool = field(init=False)
    rmm_release_threshold: float | str | None = field(init=False)
    rmm_log_directory: str | None = field(init=False)
    rmm_track_allocations: bool = field(init=False)
    rmm_allocator_external_lib_list: Sequence[str] | None = field(init=False)

    def __post_init__(self) -> None:
        for one in _GIVEN:
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
        rmm = self.allocator if isinstance(self.allocator, Mapping) else {}
        for name in RMM:
            object.__setattr__(self, f"rmm_{name}", rmm.get(name))


_GIVEN: Final = tuple(one for one in fields(Options) if one.init)
# The arguments of the plugin.
OPTION_NAMES: Final = tuple(one.name for one in _GIVEN[:13])
SETTINGS: Final = tuple(one.name for one in _GIVEN[13:])
# dask-cuda's arguments for RMM, which a cluster and the command line fold into `allocator`.
RMM_NAMES: Final = tuple(f"rmm_{name}" for name in RMM)


def fold_rmm(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with dask-cuda's ``rmm_…`` as one ``allocator``."""
    rmm = {name: given.pop(name) for name in RMM_NAMES if name in given}
    rmm = {name: value for name, value in rmm.items() if value is not None}
    if rmm and given.get("allocator") is not None:
        raise TypeError(f"give either allocator or RMM's settings, got both: {', '.join(rmm)}")
    return {**given, "allocator": rmm} if rmm else given


def remembered_tasks() -> int:
    """Return how many tasks a worker remembers, by the configuration of its own process."""
    count: Any = configured(whole_number(0), "history", config.get("history"))
    return int(count)


# -- constructors that take the options as keyword arguments

# The paragraphs of all options replace this line in a class's docstring.
_PLACE: Final = "{options}"

Init = TypeVar("Init", bound=Callable[..., None])
Class = TypeVar("Class", bound=type)


def takes_options(init: Init) -> Init:
    """Decorate a constructor that takes the options as keyword arguments, for help and editors."""
    signature = inspect.signature(init)
    *own, rest = signature.parameters.values()
    taken = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=str(one.type).removesuffix(" | None") + " | None",
        )
        for one in fields(Options)
        if one.name in OPTION_NAMES
    ]
    others = [rest] if rest.name == "kwargs" else []  # `**options` takes nothing else
    init.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *taken, *others]
    )
    return init


def documents_options(cls: Class) -> Class:
    """Decorate a class whose docstring lists the options, each with its own paragraph."""
    if cls.__doc__ and Options.__doc__:  # python -OO leaves none
        text = inspect.cleandoc(Options.__doc__).split("----------\n", 1)[1].split("\n\nRaises")[0]
        cls.__doc__ = cls.__doc__.replace(_PLACE, text.replace("\n", "\n    "))
    return cls


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], owner: str) -> None:
    """Refuse unknown keyword arguments of a class; the error has the remedy."""
    for name, value in given.items():
        if name in known:
            continue
        if name in SETTINGS:
            key = f"devctx.{key_of(name)}"
            remedy = f"It is configuration: dask.config.set({{{key!r}: {value!r}}})"
        elif name in RMM_NAMES or name == "pool":
            said = {name.removeprefix("rmm_"): value} if name in RMM_NAMES else value
            remedy = f"Write allocator={said!r}, which is devctx.allocator in the configuration"
        else:
            near = nearest(name, known)
            remedy = f"Did you mean {near}?" if near else f"help({owner}) lists all options"
        raise TypeError(f"{owner} has no option {name!r}. {remedy}")
