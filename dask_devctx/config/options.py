"""The options of the plugin: a field for each, with its check, and the packages that they need.

A new option is a field of :class:`Options`, a key in ``devctx.yaml`` and in ``devctx-schema.yaml``,
and a row in ``docs/configuration.md``. All but everyday ones have ``argument=False``.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from textwrap import fill, indent
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
    flag,
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
from dask_devctx.errors import COUNTS_OF_GPUS, nearest, variable


def fair_memory(n_devices: int) -> int:
    """Return the bytes of host memory for workers that use so many of the machine's devices."""
    found = discovery.inventory(driver.backend())
    total = len(found.devices)
    if psutil.virtual_memory().total <= MEMORY_LIMIT:
        total += len(found.hidden)
    return int(MEMORY_LIMIT * n_devices) // max(total, n_devices, 1)


def _option(check: Check, *, default: object = None, argument: bool = True) -> Any:
    """Return an optional field; it may be an ``argument`` of the plugin."""
    return field(default=default, metadata={"check": check, "argument": argument})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the plugin, checked; the defaults come from the configuration.

    Its texts are the descriptions in ``devctx-schema.yaml``.

    Raises
    ------
    TypeError
        ``devices`` is not a sequence, or ``policy`` not a function of one argument.
    ValueError
        An option, or the configuration that stands in for it, is out of range.
    """

    devices: Sequence[object] | None = _option(list_of_devices)
    devices_per_worker: int | None = _option(whole_number(1))
    shared: bool = _option(flag)
    tasks_per_device: int = _option(whole_number(1))
    cpu_threads: int | None = _option(whole_number(1))
    unannotated: Literal["assign", "leave"] = _option(one_of("assign", "leave"))
    move_inputs: bool = _option(flag)
    policy: Callable[[Sequence[Any]], Any] | None = _option(function)  # noqa: RUF009
    synchronize: bool = _option(flag)
    oom_retries: int = _option(whole_number(0))
    ipc: Literal["auto"] | bool = _option(one_of("auto", True, False))
    # None means that there is no limit, so the value for "not given" is another one.
    device_memory_limit: float | str | None = _option(memory_limit, default=no_default)
    allocator: Literal["cupy-async"] | Mapping[str, Any] | None = _option(allocator)
    replica_limit: float = _option(fraction, argument=False)
    nvtx: bool = _option(flag, argument=False)
    ipc_staging: float = _option(share_of_memory, argument=False)
    enable_cudf_spill: bool = _option(flag, argument=False)
    cudf_spill_stats: int = _option(one_of(0, 1, 2), argument=False)
    pre_import: Sequence[str] | str | None = _option(names_of(), argument=False)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, key = getattr(self, one.name), key_of(one.name)
            check: Check = one.metadata["check"]
            if value is one.default and key in config.defaults["devctx"]:
                value = config.get(key)
                check = partial(configured, check)
            if value is not None or config.defaults["devctx"].get(key) is not None:
                value = check(one.name, value)
            object.__setattr__(self, one.name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in RMM_NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rmm = self.allocator if isinstance(self.allocator, Mapping) else {}
        return rmm.get(name.removeprefix("rmm_"))


# The arguments of the plugin.
OPTION_NAMES: Final = tuple(one.name for one in fields(Options) if one.metadata["argument"])
SETTINGS: Final = tuple(one.name for one in fields(Options) if one.name not in OPTION_NAMES)
# dask-cuda's arguments for RMM, which a cluster and the command line fold into `allocator`.
RMM_NAMES: Final = tuple(f"rmm_{name}" for name in RMM)


def fold_rmm(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with dask-cuda's ``rmm_…`` as one ``allocator``."""
    rmm = {name: value for name in RMM_NAMES if (value := given.pop(name, None)) is not None}
    if rmm and given.get("allocator") is not None:
        raise TypeError(f"give either allocator or RMM's settings, got both: {', '.join(rmm)}")
    return {**given, "allocator": rmm} if rmm else given


def remembered_tasks() -> int:
    """Return how many tasks a worker remembers, by the configuration of its own process."""
    return int(configured(whole_number(0), "history", config.get("history")))


def text_of(name: str) -> str:
    """Return the text about an option."""
    if name == "policy":  # the only one that is not configured
        return (
            "Chooses the device of a task that names none, given a Candidate for each device: see "
            '"Which device a task gets" in the documentation. By default the task goes where it '
            "starts soonest."
        )
    schema = config.schema()
    if name in RMM_NAMES:
        schema, name = schema["allocator"]["properties"], name.removeprefix("rmm_")
    if name not in schema and (name := key_of(name)) not in schema:
        raise KeyError(f"devctx-schema.yaml has no text for {name}")
    described: str = schema[name]["description"]
    return " ".join(described.split()).replace("null", "None")


Class = TypeVar("Class", bound=type)


def takes_options(cls: Class) -> Class:
    """Decorate a class whose constructor takes the options as keyword arguments.

    Its signature names them, for help and editors, and their texts replace ``{options}`` in its
    docstring.
    """
    signature = inspect.signature(cls.__init__)  # type: ignore[misc]
    *own, rest = signature.parameters.values()
    options = [one for one in fields(Options) if one.name in OPTION_NAMES]
    taken = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=str(one.type).removesuffix(" | None") + " | None",
        )
        for one in options
    ]
    others = [rest] if rest.name == "kwargs" else []  # `**options` takes nothing else
    cls.__init__.__signature__ = signature.replace(  # type: ignore[misc]
        parameters=[*own, *taken, *others]
    )
    if cls.__doc__:  # python -OO leaves none
        texts = (f"    {n}\n{indent(fill(text_of(n), 92), ' ' * 8)}" for n in OPTION_NAMES)
        cls.__doc__ = cls.__doc__.replace("    {options}", "\n".join(texts))
    return cls


# By the beginning of the names of dask-cuda's arguments.
_INSTEAD: Final = {
    **dict.fromkeys(COUNTS_OF_GPUS, "Write devices=[0, 1], or leave it out"),
    "CUDA_VISIBLE_DEVICES": "Write devices=[0, 1] for 0,1, or set it in the environment",
    "shared_filesystem": "Leave it out: spilled values stay in host memory",
    **dict.fromkeys(
        ("jit_unspill", "enable_jit_unspill"), "Leave it out: device_memory_limit spills values"
    ),
    "log_spilling": "Leave it out: the report and the page /devices show what is spilled",
    "enable_": "Leave it out: values go by CUDA IPC, or as protocol says",
}


def instead_of(name: str, value: Any = "…") -> str:
    """Return what takes the place of an option of dask-cuda, or of one in the configuration."""
    if name in SETTINGS:
        setting = f"dask.config.set({{{f'devctx.{key_of(name)}'!r}: {value!r}}})"
        return f"It is configuration: {setting}, or {variable(key_of(name))} in the environment"
    if name in RMM_NAMES or name == "pool":
        said = {name.removeprefix("rmm_"): value} if name in RMM_NAMES else value
        return f"Write allocator={said!r}, which is devctx.allocator in the configuration"
    return next((text for start, text in _INSTEAD.items() if name.startswith(start)), "")


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], owner: str) -> None:
    """Refuse unknown keyword arguments of a class; the error has the remedies."""
    refused = []
    for name in given.keys() - {*known}:
        near = nearest(name, known)
        near = f"Did you mean {near}?" if near else f"help({owner}) lists all options"
        remedy = instead_of(name, given[name]) or near
        refused.append(f"{owner} has no option {name!r}. {remedy}")
    if refused:
        raise TypeError(". ".join(sorted(refused)))


# -- the packages that options need

# The name of each module's package in pip. Those with 13 are for CUDA 13: for CUDA 12, it is 12.
_PIP: Final = {
    **{name: f"{name.replace('_', '-')}-cu13" for name in ("rmm", "cudf", "distributed_ucxx")},
    "cupy": "cupy-cuda13x",
    "numba": "numba-cuda",
    **{name: name for name in ("torch", "nvtx")},
}


def rmm_options(options: Options) -> tuple[str, ...]:
    """Return the names of the options that ask for RMM."""
    return tuple(f"rmm_{name}" for name in RMM if getattr(options, f"rmm_{name}"))


def require_packages(options: Options) -> None:
    """Check that the packages that the options need are installed; nothing is imported."""
    for name in rmm_options(options):
        require(name, "rmm")
    for library in options.rmm_allocator_external_lib_list or ():
        require("rmm_allocator_external_lib_list", library)
    if options.allocator == "cupy-async":
        require("allocator", "cupy")
    if options.enable_cudf_spill:
        require("enable_cudf_spill", "cudf")
    if options.nvtx:
        require("nvtx", "nvtx")
    for module in options.pre_import or ():
        require("pre_import", module)


def require(option: str, package: str) -> None:
    """Check that a package that an option needs is installed."""
    try:
        found = importlib.util.find_spec(package.partition(".")[0])
    except ValueError:  # a module without a specification, or None in sys.modules
        found = None
    if found is None:
        remedy = f"install the package that has the module {package}"
        if pip := _PIP.get(package):
            other = f" ({pip.replace('13', '12')} for CUDA 12)" if "13" in pip else ""
            remedy = f"pip install {pip}{other}"
        raise ImportError(
            f"{option} needs the package {package}, which is not installed: {remedy}", name=package
        )


def is_ucx(protocol: str | None) -> bool:
    """Return whether a protocol, or an address, is of UCX."""
    return protocol is not None and protocol.partition(":")[0] in ("ucx", "ucxx")


def require_ucx(protocol: str | None) -> None:
    """Check that UCX is installed if a protocol or an address needs it."""
    # dask itself only warns. "ucp" is the package of earlier versions.
    if is_ucx(protocol) and importlib.util.find_spec("ucp") is None:
        require(f"protocol={str(protocol).partition(':')[0]!r}", "distributed_ucxx")
