"""Python itself in a worker's process: one lock and one garbage collector for all its GPUs."""

from __future__ import annotations

import gc
import sys

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx import config

_LOOK_INTERVAL_MS = 1000


def switch_interval() -> float | None:
    """Return the switch interval that is configured, in seconds; None where it is left alone.

    Raises
    ------
    ValueError
        It is no time, or out of range.
    """
    found = config.seconds("switch-interval")
    if found is not None and not 0 < found < 1000:  # Python keeps it as an int of microseconds
        raise ValueError(
            "devctx.switch-interval is between 1us and 1000s, or null; got "
            f"{config.get('switch-interval')!r}"
        )
    return found


class Interpreter:
    """While it is open, a worker's Python is set for threads that drive GPUs.

    Parameters
    ----------
    worker
        The worker, on whose event loop this is called.
    interval_s
        The switch interval, in seconds; None leaves it.

    Notes
    -----
    Libraries give Python's lock up in each call into CUDA, for a few microseconds. A thread that
    has it then keeps it for ``sys.getswitchinterval()``, 5 ms by default, and beside a busy event
    loop each kernel waits that long. ``devctx.switch-interval`` is what it is set to.

    A full garbage collection looks at every object of the imported libraries, and all GPUs wait for
    it. With ``devctx.gc-freeze`` these objects are left out (``gc.freeze``): whenever modules were
    imported since the last time and no task is there whose objects could be among them. Only where
    the worker has a nanny, since its process is the worker's alone then. Where memory runs out,
    nothing is left out any more.

    Both belong to the process: of several workers in one, the first sets and the last restores.
    """

    _open = 0
    _interval_before = 0.0
    _interval = 0.0  # as it was set, and as Python rounds it

    def __init__(self, worker: Worker, interval_s: float | None) -> None:
        self._worker = worker
        self._modules = 0
        self._looking: PeriodicCallback | None = None
        if not Interpreter._open:
            Interpreter._interval_before = sys.getswitchinterval()
            if interval_s is not None:
                sys.setswitchinterval(interval_s)
            Interpreter._interval = sys.getswitchinterval()
        Interpreter._open += 1
        if config.get("gc-freeze") and worker.nanny:
            self._looking = PeriodicCallback(self._freeze_when_idle, _LOOK_INTERVAL_MS)
            self._looking.start()

    def close(self) -> None:
        """Set all back as it was, unless somebody else has set it since."""
        if self._looking is not None:
            self._looking.stop()
            gc.unfreeze()
        Interpreter._open -= 1
        if not Interpreter._open and sys.getswitchinterval() == Interpreter._interval:
            sys.setswitchinterval(Interpreter._interval_before)

    def _freeze_when_idle(self) -> None:
        if len(sys.modules) > self._modules and not self._worker.state.tasks:
            self._modules = len(sys.modules)
            gc.collect()
            gc.freeze()
