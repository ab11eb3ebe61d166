"""The arguments of a cluster beside the plugin's options: dask's, and those of dask-cuda's cluster.

:data:`DASK_CUDAS` is the table of the second kind; docs/from-dask-cuda.md shows it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import dask
from dask.utils import parse_bytes
from distributed import LocalCluster, Nanny, Worker
from distributed.comm import get_address_host

from dask_devctx.config.options import OPTION_NAMES, fold_rmm
from dask_devctx.config.packages import is_ucx, require_ucx
from dask_devctx.config.signatures import refuse_unknown
from dask_devctx.cuda.device import Device
from dask_devctx.errors import DeviceNotFoundError

logger = logging.getLogger(__name__)


class Argument(NamedTuple):
    """The outcome of an argument of ``LocalCUDACluster`` here."""

    outcome: Literal["works", "not needed"]
    text: str


# Arguments of dask-cuda's that are configuration of the plugin.
SETTINGS_OF_DASK_CUDA: Final = frozenset({"enable_cudf_spill", "cudf_spill_stats", "pre_import"})
_ONE_MACHINE: Final = "all workers are on this machine, and values on GPUs go by CUDA IPC"

_WORKS: Final = {
    "CUDA_VISIBLE_DEVICES": "the devices, by the variable's own rules; the workers' processes get "
    "the variable. `devices=[0, 1]` names devices without it",
    "n_workers": "the number of workers; the devices are divided evenly among them. `devices=` "
    "leaves devices out",
    "threads_per_worker": "**not tasks per GPU**, but how many tasks dask gives a worker at a "
    "time. `tasks_per_device=` is how many run on a GPU",
    "memory_limit": "host memory of each worker",
    "device_memory_limit": 'the same, and `"auto"` means 0.8 of each GPU, as `"default"`',
    "protocol": 'the same; `"ucx"` and `"ucxx"` need the package `distributed-ucxx-cu13`',
    "enable_tcp_over_ucx": 'the same: it implies `protocol="ucx"`',
    "rmm_allocator_external_lib_list": "the same, also for Numba",
    "rmm_log_directory": "the same; also without a pool",
    "worker_class": "a class of nannies, or of workers; the workers run in this process, unless "
    "`processes=True` gives each of them a nanny",
    **dict.fromkeys(
        ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold"),
        "the same, for each device of a worker",
    ),
    **dict.fromkeys(
        ("rmm_managed_memory", "rmm_async", "rmm_track_allocations", *SETTINGS_OF_DASK_CUDA),
        "the same",
    ),
    **dict.fromkeys(("local_directory", "data"), "the same"),
}
_NOT_NEEDED: Final = {
    "shared_filesystem": "values are not shared by files",
    "enable_infiniband": f"{_ONE_MACHINE}. With UCX, it is passed on",
    "enable_nvlink": "values on GPUs go by CUDA IPC, which uses NVLink where it is. With UCX, it "
    "is passed on",
    "enable_rdmacm": f"{_ONE_MACHINE}. With UCX, it is passed on",
    "jit_unspill": "a value comes back to its device before its task, by itself",
    "log_spilling": "the log says when spilling begins, `report(client)` how much",
}
DASK_CUDAS: Final[Mapping[str, Argument]] = {
    **{name: Argument("works", text) for name, text in _WORKS.items()},
    **{name: Argument("not needed", text) for name, text in _NOT_NEEDED.items()},
}

# Names that are like none of ours, and mean something here.
_DEVICES: Final = "devices=[0, 1] names the devices, and n_workers= is the number of workers"
_SPILLING: Final = 'device_memory_limit="12 GiB" moves values of a full device to host memory'
_MEANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gpu", "gpus", "n_gpus", "num_gpus", "ngpus", "num_devices"), _DEVICES),
    **dict.fromkeys(("spill", "spilling", "device_spill", "gpu_memory_limit"), _SPILLING),
}

# The arguments for UCX, and their keys in its configuration.
UCX: Final = {
    "enable_tcp_over_ucx": "tcp",
    "enable_infiniband": "infiniband",
    "enable_nvlink": "nvlink",
    "enable_rdmacm": "rdmacm",
}


def without_dask_cudas(given: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Return the arguments of ``LocalCluster`` and of the plugin for those that were given."""
    _refuse_unknown(given, owner)
    kept = fold_rmm(dict(given))
    set_up_ucx(kept)
    check_memory_limit(kept.get("memory_limit"))
    for name, argument in DASK_CUDAS.items():
        if argument.outcome == "not needed" and kept.pop(name, None):
            logger.warning("%s is not needed: %s", name, argument.text)
    _name_devices(kept)
    if kept.get("memory_limit") == "auto":
        del kept["memory_limit"]  # LocalCluster divides the machine's memory among the workers
    worker_class = kept.get("worker_class")
    if (
        kept.get("processes")
        and isinstance(worker_class, type)
        and not issubclass(worker_class, Nanny)
    ):
        kept["worker_class"] = functools.partial(Nanny, worker_class=worker_class)
    return kept


def has_nannies(kept: Mapping[str, Any]) -> bool:
    """Return whether each worker has a process of its own, given the cluster's arguments."""
    worker_class = kept.get("worker_class")
    if worker_class is None:
        return kept.get("processes") is not False
    return not isinstance(worker_class, type) or issubclass(worker_class, Nanny)


def _refuse_unknown(given: Mapping[str, Any], owner: type) -> None:
    if "device" in given:
        which = given["device"]
        devices, of_a_task = list(which) if isinstance(which, list | tuple) else [which], ""
        if not isinstance(which, list | tuple):
            of_a_task = f". For a task: with dask.annotate(device={which!r})"
        raise TypeError(
            f"{owner.__name__} has no option 'device', which is the annotation of a task. The "
            f"cluster's devices are a list: {owner.__name__}(devices={devices!r}){of_a_task}"
        )
    for name in _MEANT.keys() & given.keys():
        raise TypeError(f"{owner.__name__} has no option {name!r}: {_MEANT[name]}")
    worker_class = given.get("worker_class")
    if worker_class is not None and not callable(worker_class):
        raise TypeError(
            f"worker_class is a class of nannies or of workers, got {worker_class!r}. Leave it out "
            "for dask's own: the workers use their devices without a class such as CUDAWorker"
        )
    known = {*OPTION_NAMES, *_known(given, owner), *DASK_CUDAS}
    refuse_unknown(given, known, owner.__name__)


def _known(given: Mapping[str, Any], owner: type) -> Iterator[str]:
    """Yield the names of LocalCluster's arguments and of those that it hands on to its workers."""
    worker_class = given.get("worker_class")
    classes = [*owner.__mro__[: owner.__mro__.index(LocalCluster) + 1], *Nanny.__mro__]
    classes += [*Worker.__mro__, *(worker_class.__mro__ if isinstance(worker_class, type) else ())]
    for cls in classes:
        if inspect.isfunction(init := vars(cls).get("__init__")):
            for name, parameter in inspect.signature(init).parameters.items():
                if parameter.kind is not parameter.VAR_KEYWORD:
                    yield name


# -- CUDA_VISIBLE_DEVICES


def _name_devices(kept: dict[str, Any]) -> None:
    """Replace ``CUDA_VISIBLE_DEVICES`` by the devices, and by the variable of the workers."""
    value = kept.pop("CUDA_VISIBLE_DEVICES", None)
    if value is None:
        return
    if kept.get("devices") is not None:
        raise TypeError("give either CUDA_VISIBLE_DEVICES or devices, got both")
    if isinstance(value, bool) or not isinstance(value, int | str | Iterable):
        raise TypeError(
            f"CUDA_VISIBLE_DEVICES is a list of devices, text with commas, or one, got {value!r}"
        )
    given = [value] if isinstance(value, int) else value
    entries = [str(one).strip() for one in (given.split(",") if isinstance(given, str) else given)]
    if not any(entries):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is empty, got {value!r}. Leave it out for all devices, or name "
            "some: CUDA_VISIBLE_DEVICES=[0, 1]"
        )
    kept["devices"] = [_given_device(entry, ",".join(entries)).uuid for entry in entries]
    if kept.get("n_workers") is None:
        kept["n_workers"] = len(kept["devices"])
    if has_nannies(kept):
        own = {"CUDA_VISIBLE_DEVICES": ",".join(entries)}
        kept["env"] = {**(kept.get("env") or {}), **own}


def _given_device(entry: str, value: str) -> Device:
    try:
        return visible_device(entry)
    except DeviceNotFoundError as error:
        hint = (
            "The argument CUDA_VISIBLE_DEVICES may name only devices that are there. In a variable "
            "of the environment, the driver would ignore this entry and all after it"
        )
        raise DeviceNotFoundError(entry, error.available, value, hint) from None


def visible_device(entry: str) -> Device:
    """Return the device of an entry of ``CUDA_VISIBLE_DEVICES``, as a process without it counts."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not entry.isdecimal() or own is None:
        return Device(entry)
    shown = [one.strip() for one in own.split(",")]
    # A number that this process's variable does not have is an ordinal past the last one.
    return Device(shown.index(entry) if entry in shown else max(int(entry), len(shown)))


# -- UCX


def set_up_ucx(kept: dict[str, Any]) -> None:
    """Configure UCX, if it is the protocol, by the arguments ``enable_…``, and take these out."""
    flags = {key: kept[name] for name, key in UCX.items() if kept.get(name) is not None}
    protocol = kept.get("protocol")
    if kept.pop("enable_tcp_over_ucx", None):
        if protocol is None:
            protocol = kept["protocol"] = "ucx"
        elif not is_ucx(protocol):
            raise TypeError(f"enable_tcp_over_ucx needs protocol='ucx', got {protocol!r}")
    if protocol is None:
        return
    if not is_ucx(protocol):
        _check_protocol(protocol)
        return
    require_ucx(protocol)
    for name in UCX:
        kept.pop(name, None)
    if any(flags.values()):
        flags["cuda-copy"] = True
    # For this process, where the client is, and so for the nannies and workers that it starts.
    dask.config.set({f"distributed-ucxx.{key}": value for key, value in flags.items()})


def _check_protocol(protocol: str) -> None:
    try:
        get_address_host(f"{protocol.partition(':')[0]}://127.0.0.1:1")
    except ValueError as error:
        raise ValueError(f"protocol={protocol!r} cannot be used: {error}") from None
    except Exception as error:  # each transport has its own addresses
        logger.debug("The protocol %s was not checked: %r", protocol, error)


def check_memory_limit(limit: object) -> None:
    """Refuse a text that is no amount of host memory."""
    if not isinstance(limit, str) or limit == "auto":
        return
    try:
        parse_bytes(limit)
    except ValueError:
        raise ValueError(
            "memory_limit must be bytes such as '4 GiB', a fraction of the host's memory, 'auto', "
            f"or 0 for no limit, got {limit!r}"
        ) from None
