"""Who takes part where clusters are compared, as far as this machine has it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from benchmarks.case import CannotRunError, Missing
from benchmarks.host import Entry
from dask_devctx import devices, driver
from dask_devctx.errors import DevctxError

_POOL_NBYTES = 60 * 10**9
TCP = "dask-cuda, TCP"
UCXX = "dask-cuda, UCXX and RMM pool"


def library() -> str:
    """Return what makes arrays on this machine's GPUs.

    Raises
    ------
    CannotRunError
        Nothing does.
    """
    if driver.backend().simulated:
        return "simulated"
    if find_spec("cupy") is None:
        raise CannotRunError("CuPy is not installed")
    return "cupy"


def n_devices(at_least: int = 1) -> int:
    """Return how many GPUs there are.

    Raises
    ------
    CannotRunError
        Fewer than are needed.
    """
    try:
        found = len(devices())
    except DevctxError as error:
        raise CannotRunError(str(error)) from error
    if found < at_least:
        raise CannotRunError(f"{at_least} GPUs are needed, and CUDA shows this process {found}")
    return found


def where() -> str:
    """Return what to add to a case's name, so that nobody takes simulated numbers for real."""
    return ", SIMULATED devices" if driver.backend().simulated else ""


def dask_cuda(
    module: str, n_devices: int, **options: dict[str, Any]
) -> tuple[list[Entry], list[Missing]]:
    """Return dask-cuda's entries, and those that cannot take part.

    Parameters
    ----------
    module
        Its ``dask_cuda`` makes what is measured; see :func:`benchmarks.clusters.dask_cuda`.
    **options
        For ``tcp`` and for ``ucxx``, what the contenders are given.
    """
    total = min((device.memory_info.total for device in devices()), default=0)
    pool = min(_POOL_NBYTES, int(0.4 * total))
    ways = [
        ("tcp", TCP, None, ("dask_cuda",)),
        ("ucxx", UCXX, pool, ("dask_cuda", "ucxx", "distributed_ucxx", "rmm")),
    ]
    entries, missing = [], []
    for protocol, name, nbytes, needs in ways:
        absent = [need for need in needs if find_spec(need) is None]
        if absent:
            missing.append(Missing(name, f"not installed: {', '.join(absent)}"))
        elif driver.backend().simulated:
            missing.append(Missing(name, "the devices are simulated"))
        else:
            args = (library(), n_devices, protocol, nbytes)
            given = options.get(protocol, {})
            entries.append(Entry(name, f"{module}:dask_cuda", args, given))
    return entries, missing
