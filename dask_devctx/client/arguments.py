"""The arguments of a cluster beside the plugin's options: dask's, and those of dask-cuda's cluster.

docs/from-dask-cuda.md has a table of the second kind.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from dask.utils import get_named_args
from distributed import Nanny, Worker

from dask_devctx.config.options import (
    OPTION_NAMES,
    RMM_NAMES,
    fold_rmm,
    is_ucx,
    refuse_unknown,
    require_ucx,
)
from dask_devctx.cuda.device import Device

logger = logging.getLogger(__name__)

# Arguments of dask-cuda's that are configuration of the plugin.
SETTINGS_OF_DASK_CUDA: Final = frozenset({"enable_cudf_spill", "cudf_spill_stats", "pre_import"})
_UCX: Final = "values on GPUs go by CUDA IPC. UCX, with protocol='ucx', finds its own transports"
# Arguments of dask-cuda's that change nothing here, and why.
NOT_NEEDED: Final[Mapping[str, str]] = {
    "shared_filesystem": "values are not shared by files",
    "jit_unspill": "a value comes back to its device before its task, by itself",
    "log_spilling": "the log says when spilling begins, `report(client)` how much",
    "enable_tcp_over_ucx": _UCX,
    "enable_infiniband": _UCX,
    "enable_nvlink": _UCX,
    "enable_rdmacm": _UCX,
}
_DASK_CUDAS: Final = {*SETTINGS_OF_DASK_CUDA, *NOT_NEEDED, *RMM_NAMES, "CUDA_VISIBLE_DEVICES"}


def without_dask_cudas(given: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """Return the arguments of ``LocalCluster`` and of the plugin for those that were given."""
    worker_class = given.get("worker_class")
    if worker_class is not None and not callable(worker_class):
        raise TypeError(
            f"worker_class is a class of nannies or of workers, got {worker_class!r}. Leave it out "
            "for dask's own: the workers use their devices without a class such as CUDAWorker"
        )
    bases = {*owner.__mro__, *Nanny.__mro__, *Worker.__mro__}
    bases.update(worker_class.__mro__ if isinstance(worker_class, type) else ())
    known = {name for cls in bases for name in get_named_args(cls.__init__)}
    refuse_unknown(given, known | {*OPTION_NAMES} | _DASK_CUDAS, owner.__name__)
    kept = fold_rmm(dict(given))
    if is_ucx(kept.get("protocol")):
        require_ucx(kept["protocol"])
    for name, reason in NOT_NEEDED.items():
        if kept.pop(name, None):
            logger.warning("%s is not needed: %s", name, reason)
    _name_devices(kept)
    if kept.get("memory_limit") == "auto":
        del kept["memory_limit"]  # the machine's memory is divided among the workers
    if kept.get("processes") and isinstance(worker_class, type) and not _is_nanny(worker_class):
        kept["worker_class"] = functools.partial(Nanny, worker_class=worker_class)
    return kept


def has_nannies(kept: Mapping[str, Any]) -> bool:
    """Return whether each worker has a process of its own, given the cluster's arguments."""
    worker_class = kept.get("worker_class")
    if worker_class is None:
        return kept.get("processes") is not False
    return _is_nanny(worker_class)


def _is_nanny(worker_class: object) -> bool:
    return not isinstance(worker_class, type) or issubclass(worker_class, Nanny)


# -- CUDA_VISIBLE_DEVICES


def _name_devices(kept: dict[str, Any]) -> None:
    """Replace ``CUDA_VISIBLE_DEVICES`` by the devices, and by the variable of the workers."""
    value = kept.pop("CUDA_VISIBLE_DEVICES", None)
    if value is None:
        return
    if kept.get("devices") is not None:
        raise TypeError("give either CUDA_VISIBLE_DEVICES or devices, got both")
    given = value.split(",") if isinstance(value, str) else value
    entries = [str(one).strip() for one in ([given] if isinstance(given, int) else given)]
    if not any(entries):
        raise ValueError(f"CUDA_VISIBLE_DEVICES is empty, got {value!r}: leave it out for all")
    kept["devices"] = [visible_device(entry).uuid for entry in entries]
    if kept.get("n_workers") is None:
        kept["n_workers"] = len(kept["devices"])
    if has_nannies(kept):
        own = {"CUDA_VISIBLE_DEVICES": ",".join(entries)}
        kept["env"] = {**(kept.get("env") or {}), **own}


def visible_device(entry: str) -> Device:
    """Return the device of an entry of ``CUDA_VISIBLE_DEVICES``, as a process without it counts."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not entry.isdecimal() or own is None:
        return Device(entry)
    shown = [one.strip() for one in own.split(",")]
    # A number that this process's variable does not have is an ordinal past the last one.
    return Device(shown.index(entry) if entry in shown else max(int(entry), len(shown)))
