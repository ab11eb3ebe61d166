"""The packages that options need."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from dask_devctx.config.checks import RMM

if TYPE_CHECKING:
    from dask_devctx.config.options import Options

_INSTALL: Final = {
    "rmm": "pip install rmm-cu13 (rmm-cu12 for CUDA 12), or conda install -c rapidsai rmm",
    "cupy": "pip install cupy-cuda13x (cupy-cuda12x for CUDA 12)",
    "torch": "pip install torch",
    "numba": "pip install numba-cuda",
    "cudf": "pip install cudf-cu13 (cudf-cu12 for CUDA 12), or conda install -c rapidsai cudf",
    "nvtx": "pip install nvtx",
    "distributed_ucxx": "pip install distributed-ucxx-cu13 (distributed-ucxx-cu12 for CUDA 12)",
}


def rmm_options(options: Options) -> tuple[str, ...]:
    """Return the names of the options that ask for RMM."""
    return tuple(f"rmm_{name}" for name in RMM if getattr(options, f"rmm_{name}"))


def rmm_keeps_memory(options: Options) -> bool:
    """Return whether RMM keeps memory that is not in use, or has more than a device has."""
    return bool(options.rmm_pool_size or options.rmm_async or options.rmm_managed_memory)


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
        remedy = _INSTALL.get(package, f"install the package that has the module {package}")
        raise ImportError(
            f"{option} needs the package {package}, which is not installed: {remedy}", name=package
        )


def is_ucx(protocol: str | None) -> bool:
    """Return whether a protocol, or an address, is of UCX."""
    return protocol is not None and protocol.partition(":")[0] in ("ucx", "ucxx")


def require_ucx(protocol: str) -> None:
    """Check that UCX is installed; raise as :func:`require` does."""
    if importlib.util.find_spec("ucp") is None:  # the package of earlier versions
        require(f"protocol={protocol!r}", "distributed_ucxx")
