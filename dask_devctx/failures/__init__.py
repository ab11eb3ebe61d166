"""When things break: the right task is blamed, nothing is lost, and the worker comes back."""

from dask_devctx.failures.guard import Guard, GuardedTask
from dask_devctx.failures.restart import end_failed_worker

__all__ = ["Guard", "GuardedTask", "end_failed_worker"]
