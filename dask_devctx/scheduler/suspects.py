"""The suspects of a broken device, on the scheduler: which of them run again, isolated, or err."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any, Final

from distributed import Scheduler

from dask_devctx.annotations import ISOLATED, REFUSED, RERUN, had_all_runs, isolated_run, runs_once
from dask_devctx.dask_internals.scheduler import annotate
from dask_devctx.errors import listed
from dask_devctx.scheduler.messages import Failure

logger = logging.getLogger(__name__)

_ONCE: Final = f"it says {RERUN}=False"
_LOST: Final = f"its result was lost, and {_ONCE}"
_NOT_AGAIN: Final = "Tasks that do not run again, and err if they are needed"
_SHOWN: Final = 8  # the most keys that a message in the log shows


class SuspectTasks:
    """Marks the tasks that may have broken a worker's devices, by the worker's word.

    A task that may run again is isolated then, at most ``allowed-failures`` times. The next worker
    fails all others with the error of the device, without a call of them. Marks are annotations: so
    they outlive the worker that named the tasks, and last as long as the scheduler knows the task.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # The fields of each failed worker's error, and the tasks that are refused. While both are
        # empty, `moved` has nothing to do.
        self.failed_workers: dict[str, tuple[Any, ...]] = {}
        self.refused: set[Hashable] = set()

    def failed(self, worker: str, failure: Failure) -> None:
        """Mark the tasks that a failed worker names, once."""
        if worker in self.failed_workers or worker not in self._scheduler.workers:
            return  # the event and the message say the same
        self.failed_workers[worker] = tuple(failure.fields)
        again, once, gone, erred = [], [], [], dict(failure.erred)
        for key in dict.fromkeys((*failure.suspects, *failure.bystanders)):
            ts = self._scheduler.tasks.get(key)
            if ts is None:
                if key not in erred:  # calls that are no tasks err at once
                    gone.append(key)
            elif key in erred:  # it may have retries
                self._watch(ts, counted=False)
            elif key in failure.suspects and runs_once(ts.annotations):
                self._refuse(ts, failure.fields, _ONCE)
                once.append(key)
            elif why := had_all_runs(*self._runs(ts)):
                self._refuse(ts, failure.fields, why)
                once.append(key)
            else:
                self._watch(ts)
                again.append(key)
        for ts in self._scheduler.workers[worker].has_what:
            is_lost = len(ts.who_has) == 1
            if is_lost and runs_once(ts.annotations) and ts.key not in self.refused:
                self._refuse(ts, failure.fields, _LOST)
                once.append(ts.key)
        said = (
            ("Tasks that err", erred),
            ("Tasks that run again, isolated", again),
            (_NOT_AGAIN, once),
            ("Suspects that do not run again, as nobody needs their results", gone),
        )
        logger.warning(
            "%s of %s failed with %s. %s",
            *(failure.fields[0], worker, failure.fields[2]),
            ". ".join(f"{text}: {listed([*map(str, keys)], _SHOWN)}" for text, keys in said if keys)
            or "No task was there",
        )

    def moved(self, key: Hashable, finish: str, worker: str | None = None) -> None:
        """Let a task that was refused run if a client asks for it again.

        A worker may tell of a task's end after it told of its failure: its result is lost soon.
        """
        if finish == "memory" and worker in self.failed_workers:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and runs_once(ts.annotations):
                self._refuse(ts, self.failed_workers[worker], _LOST)
                logger.warning("%s: %s", _NOT_AGAIN, key)
        if self.refused and key in self.refused and finish in ("erred", "forgotten"):
            self.refused.discard(key)
            ts = self._scheduler.tasks.get(key)
            if ts is not None:
                annotate(ts, REFUSED, None)

    def _runs(self, ts: Any) -> tuple[int, int]:
        """Return how often a task ran isolated, and how often it may."""
        run, most = isolated_run(ts.annotations)
        return run, most or self._scheduler.allowed_failures

    def _watch(self, ts: Any, *, counted: bool = True) -> None:
        run, most = self._runs(ts)
        annotate(ts, ISOLATED, [run + 1 if counted else max(run, 1), most])

    def _refuse(self, ts: Any, fields: Sequence[Any], why: str) -> None:
        self.refused.add(ts.key)
        annotate(ts, REFUSED, [*fields[:-1], why])
