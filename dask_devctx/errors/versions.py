"""The exceptions for other packages: unsupported versions, and packages that are missing."""

from __future__ import annotations

from typing import Final

from dask_devctx.errors.base import DevctxError

# The tests ran with these releases of dask and distributed, the oldest and the newest.
TESTED_DASK: Final = ("2025.4.0", "2026.8.0")


class UnsupportedDaskError(DevctxError):
    """The installed dask or distributed lacks a name that this package uses.

    Parameters
    ----------
    name
        The missing name, with its module.
    dask, distributed, dask_devctx
        The versions that are installed.

    Notes
    -----
    It is raised before anything changes.
    """

    name: str
    dask: str
    distributed: str
    dask_devctx: str

    def __str__(self) -> str:
        oldest, newest = TESTED_DASK
        return (
            f"dask-devctx {self.dask_devctx} uses {self.name}, which is not in dask {self.dask} "
            f"and distributed {self.distributed}. Nothing was changed. Install a newer "
            "dask-devctx, or a dask and distributed that this one was tested with: "
            f"{oldest} to {newest}"
        )


class MissingPackageError(DevctxError, ImportError):
    """A package that an option needs is not installed.

    Parameters
    ----------
    option
        The option.
    package
        The module that could not be found.
    remedy
        How to install it.
    """

    option: str
    package: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.option} needs the package {self.package}, which is not installed: {self.remedy}"
        )
