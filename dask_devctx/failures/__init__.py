"""When things break: the right task is blamed, nothing is lost, and the worker comes back."""

from dask_devctx.failures.blame import Failure
from dask_devctx.failures.charge import Charge
from dask_devctx.failures.guard import Guard
from dask_devctx.failures.guarded import GuardedMethod, GuardedTask

__all__ = ["Charge", "Failure", "Guard", "GuardedMethod", "GuardedTask"]
