"""When things break: the right task is blamed, nothing is lost, and the worker comes back."""

from dask_devctx.worker.failures.attribution import Failure
from dask_devctx.worker.failures.calls import GuardedMethod, GuardedTask
from dask_devctx.worker.failures.charge import Charge
from dask_devctx.worker.failures.monitor import Guard

__all__ = ["Charge", "Failure", "Guard", "GuardedMethod", "GuardedTask"]
