"""The contenders in comparisons of clusters, as far as this machine can run them."""

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
UCXX_NEEDS = ("ucxx", "distributed_ucxx", "rmm")


def library() -> str:
    """Return the name of the library that makes arrays on this machine's GPUs.

    Raises
    ------
    CannotRunError
        There is none.
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
        There are fewer than needed.
    """
    try:
        found = len(devices())
    except DevctxError as error:
        raise CannotRunError(str(error)) from error
    if found < at_least:
        raise CannotRunError(f"it needs {at_least} GPUs, and CUDA shows this process {found}")
    return found


def where() -> str:
    """Return a suffix for a case's name that marks the numbers of simulated devices."""
    return ", SIMULATED devices" if driver.backend().simulated else ""


def dask_cuda(
    module: str, n_devices: int, **options: dict[str, Any]
) -> tuple[list[Entry], list[Missing]]:
    """Return dask-cuda's entries, and those that cannot take part.

    Parameters
    ----------
    module
        The module whose ``dask_cuda`` makes the object to measure; see
        :func:`benchmarks.clusters.dask_cuda`.
    **options
        Options of the contenders, under ``tcp`` and under ``ucxx``.
    """
    ways = [
        ("tcp", TCP, None, ("dask_cuda",)),
        ("ucxx", UCXX, pool_nbytes(0.4), ("dask_cuda", *UCXX_NEEDS)),
    ]
    entries, missing = [], []
    for protocol, name, nbytes, needs in ways:
        absent = lacking(name, *needs)
        if absent is not None:
            missing.append(absent)
        else:
            args = (library(), n_devices, protocol, nbytes)
            given = options.get(protocol, {})
            entries.append(Entry(name, f"{module}:dask_cuda", args, given))
    return entries, missing


def lacking(name: str, *modules: str) -> Missing | None:
    """Return why a contender that needs GPUs and these modules cannot take part, or None."""
    absent = [module for module in modules if find_spec(module) is None]
    if absent:
        return Missing(name, f"not installed: {', '.join(absent)}")
    if driver.backend().simulated:
        return Missing(name, "the devices are simulated")
    return None


def pool_nbytes(share: float) -> int:
    """Return the size of a pool with this share of each GPU's memory, 60 GB at most."""
    total = min((device.memory_info.total for device in devices()), default=0)
    wanted = min(_POOL_NBYTES, int(share * total))
    return wanted - wanted % 2**20  # RMM takes multiples of 256 bytes
