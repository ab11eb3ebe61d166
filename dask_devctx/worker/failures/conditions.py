"""The conditions on which a task runs, since a device failed while it ran, or may fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask_devctx.annotations.runs import (
    GONE,
    PRESENT,
    RERUN,
    had_all_runs,
    may_rerun,
    refusal,
    watched_run,
)
from dask_devctx.cuda import naming
from dask_devctx.errors import DeviceFailedError, DeviceNotFoundError


def read(annotations: Mapping[str, Any] | None) -> tuple[int, str]:
    """Return the number of a task's isolated run, or 0, and why it does not run again, or ""."""
    if not annotations:
        return 0, ""
    failed = refusal(annotations)
    if failed is not None:
        raise DeviceFailedError(*failed)
    run, most = watched_run(annotations)
    if not may_rerun(annotations):
        return run, f"it says {RERUN}=False"
    return run, had_all_runs(run, most) if run else ""


def explained(error: Exception, annotations: Mapping[str, Any] | None) -> Exception:
    """Return the error of a task that got no device, with what the scheduler knows of it."""
    if not annotations or not isinstance(error, DeviceNotFoundError):
        return error
    worker, present = annotations.get(GONE), annotations.get(PRESENT)
    if worker is None:
        if present is None:
            return error
        hint = error.hint
        if naming.read(error.requested).kind == "ordinal":
            hint = "No worker of this cluster uses it"
            if len({text.partition(" ")[0] for text in present}) < len(present):
                hint += (
                    ". Each worker counts the devices that its own CUDA_VISIBLE_DEVICES shows: "
                    "name a device by its UUID"
                )
        return type(error)(error.requested, present, error.visible_devices, hint)
    return DeviceNotFoundError(
        error.requested,
        error.available,
        error.visible_devices,
        f"The worker {worker} used it, and was closed, retired or scaled down. Start a worker for "
        "it again, with cluster.scale(), or name one of the devices in report(client).devices",
    )
