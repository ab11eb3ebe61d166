"""The exception for unsupported versions of other packages."""

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
