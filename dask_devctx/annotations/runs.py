"""The annotations about a task's runs after a device failed: its user's, and the scheduler's marks.

The marks are annotations, because dask sends these to the worker that runs a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Whether a task may run again after a device failed while it ran.
RERUN: Final = "rerun"
# Marks a task that may have broken a device. The worker that runs it watches it. The value is the
# number of this watched run, and how many such runs a task may have.
WATCHED: Final = "devctx-watched"
# Marks a task that a worker fails without a call of it. The value has the fields of the error.
REFUSED: Final = "devctx-refused"

# Marks a task that names a device that no worker of the cluster uses. The value has the devices
# that workers use, for the error.
PRESENT: Final = "devctx-present"


def may_rerun(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations may run again after a device failed."""
    given = True if not annotations else annotations.get(RERUN, True)
    if not isinstance(given, bool):
        raise TypeError(
            f"the annotation {RERUN!r} is True or False: whether the task may run again after a "
            f"device failed while it ran; got {given!r} of type {type(given).__name__}"
        )
    return given


def runs_once(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations must not run twice."""
    return annotations is not None and annotations.get(RERUN) is False


def watched_run(annotations: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the number of a task's watched run, and how many it may have; zeros if unwatched."""
    if not annotations or WATCHED not in annotations:
        return 0, 0
    run, most = annotations[WATCHED]
    return run, most


def refusal(annotations: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """Return the fields of the error with which a worker fails a task; None to run it."""
    given = annotations.get(REFUSED) if annotations else None
    return None if given is None else tuple(given)


def had_all_runs(run: int, most: int) -> str:
    """Return why a task does not run again after this watched run of ``most``; "" if it does."""
    if run < most:
        return ""
    return (
        f"a device failed in each of its {run + 1} runs. distributed.scheduler.allowed-failures is "
        f"{most}"
    )
