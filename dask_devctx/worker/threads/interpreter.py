"""Python itself in a worker's process: one lock and one garbage collector for all its GPUs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module

from distributed import Worker
from tornado.ioloop import PeriodicCallback

from dask_devctx import config
from dask_devctx.dask_internals.worker import has_nanny

_LOOK_INTERVAL_MS = 1000


def switch_interval() -> float | None:
    """Return the configured switch interval in seconds; None to leave Python's own."""
    found = config.seconds("switch-interval")
    if found is not None and not 0 < found < 1000:  # Python keeps it as an int of microseconds
        raise ValueError(
            "devctx.switch-interval is between 1us and 1000s, or null; got "
            f"{config.get('switch-interval')!r}"
        )
    return found


def import_early(modules: Sequence[str]) -> None:
    """Import modules before the first task needs them."""
    for module in modules:
        import_module(module)


class _Interval:
    """The process's switch interval: the first worker sets it, the last worker restores it."""

    workers = 0
    before_s = 0.0
    set_s = 0.0  # as Python rounds it


@contextmanager
def set_for_devices(worker: Worker, interval_s: float | None) -> Iterator[None]:
    """While it is open, a worker's Python is set for threads that drive GPUs.

    Libraries release the GIL in each call into CUDA, for a few microseconds. Another thread
    that takes the lock then keeps it for ``sys.getswitchinterval()``, 5 ms by default. Beside a
    task that computes in Python, each kernel waits that long. ``devctx.switch-interval`` sets this
    interval. A short one lets threads take the lock from each other all the time, which costs more.

    A full garbage collection visits every object of the imported libraries, and all GPUs wait for
    it. ``devctx.gc-freeze`` excludes these objects (``gc.freeze``): each time that new modules were
    imported and the worker has no task whose objects could be among them. This needs a nanny,
    because the process then belongs to the worker alone. When memory runs out, all objects are
    included again.

    Both settings belong to the process. A switch interval that other code sets meanwhile stays.
    """
    with ExitStack() as steps:
        steps.enter_context(_switching_every(interval_s))
        if config.get("gc-freeze") and has_nanny(worker):
            steps.enter_context(_freezing_when_idle(worker))
        yield


@contextmanager
def _switching_every(interval_s: float | None) -> Iterator[None]:
    if not _Interval.workers:
        _Interval.before_s = sys.getswitchinterval()
        if interval_s is not None:
            sys.setswitchinterval(interval_s)
        _Interval.set_s = sys.getswitchinterval()
    _Interval.workers += 1
    try:
        yield
    finally:
        _Interval.workers -= 1
        if not _Interval.workers and sys.getswitchinterval() == _Interval.set_s:
            sys.setswitchinterval(_Interval.before_s)


@contextmanager
def _freezing_when_idle(worker: Worker) -> Iterator[None]:
    modules = 0

    def freeze_when_idle() -> None:
        nonlocal modules
        if len(sys.modules) > modules and not worker.state.tasks:
            modules = len(sys.modules)
            gc.collect()
            gc.freeze()

    looking = PeriodicCallback(freeze_when_idle, _LOOK_INTERVAL_MS)
    looking.start()
    try:
        yield
    finally:
        looking.stop()
        gc.unfreeze()
