"""Remedies for errors of Python and NumPy that a task meets because it runs on a worker."""

from __future__ import annotations

from typing import Final

_READ_ONLY: Final = (
    "If this is an input of the task: other tasks may use it too. Write x = x + 1 instead of "
    "x += 1, or change a copy of your own: x.copy() in host memory, "
    "dask_devctx.to_device(x, Device.current(), copy=True) on a device"
)
# By the type of an error and a part of its text.
_REMEDIES: Final[tuple[tuple[type[Exception], str, str], ...]] = (
    (
        AssertionError,
        "daemonic processes are not allowed to have children",
        "A worker with a nanny may not start processes. Allow it before the cluster starts, "
        'dask.config.set({"distributed.worker.daemon": False}), and start them by "spawn", as in '
        'multiprocessing.get_context("spawn")',
    ),
    (ValueError, "output array is read-only", _READ_ONLY),
    (ValueError, "assignment destination is read-only", _READ_ONLY),
)


def name_remedy(error: BaseException) -> None:
    """Add a note with the remedy to a task's error, if one is known and not there already."""
    notes = getattr(error, "__notes__", ())
    for kind, text, remedy in _REMEDIES:
        if isinstance(error, kind) and text in str(error) and remedy not in notes:
            error.add_note(remedy)
