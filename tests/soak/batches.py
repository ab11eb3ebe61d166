"""Batches of random tasks with known results."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import dask
from cuda.bindings.driver import CUresult
from distributed import Client, Future, wait

from dask_devctx import DeviceFailedError, on_device
from tests.soak import tasks

# Elements of 8 bytes.
SMALL, LARGE = 256, 65_536
# Some tasks meet a fault of the driver that is not theirs to handle, and are tried again by dask.
RETRIES = 20
GUILTY = "guilty"


class Restarted(Exception):
    """The scheduler was restarted, so the batch has to be submitted again."""


class Hang(Exception):
    """A batch made no progress; the text shows its tasks."""


@dataclass
class Expected:
    """A task's future, its kind, and its right value."""

    future: Future
    kind: str
    value: Any


class Batch:
    """Random tasks, the same for the same seed and number.

    Parameters
    ----------
    seed, number
        The run's seed, and the number of the batch in it.
    size
        How many tasks it has.
    guilty
        The probability that one of its tasks breaks a device.
    plain
        Whether the tasks run on dask without this package.
    calm
        Whether no task meets a fault.
    """

    def __init__(
        self, seed: int, number: int, size: int, *, guilty: float, plain: bool, calm: bool
    ) -> None:
        self.name = f"{seed}.{number}"
        self.size = size
        self._guilty = 0.0 if calm else guilty
        self._plain, self._calm = plain, calm
        self._expected: list[Expected] = []
        self._values: list[tuple[Future, int]] = []

    def submit(self, client: Client) -> None:
        """Submit all tasks; again, if they were submitted before."""
        # The same choices each time, also of the tasks that dask is told to run again.
        self._random = random.Random(self.name)
        self._client = client
        made = self.size // 3
        self._values = [self._made() for _ in range(made)]
        self._expected = [one for _ in range(self.size - made) for one in self._task()]

    def check(
        self, patience_s: float, is_lost: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[str, str, str]]:
        """Wait for all tasks; yield the kind of each, its outcome and more words.

        Parameters
        ----------
        patience_s
            How long nothing may be done.
        is_lost
            Returns whether the scheduler was restarted since the batch was submitted.

        Raises
        ------
        Restarted
            A result was lost with the scheduler.
        Hang
            Nothing was done for ``patience_s`` seconds.
        """
        self._wait(patience_s, is_lost)
        gathered = self._gathered(patience_s)
        for one in self._expected:
            yield one.kind, *self._outcome(one, gathered, patience_s)

    def release(self) -> None:
        """Let the results go."""
        self._expected, self._values = [], []

    # -- the tasks

    def _submit(
        self, function: Callable[..., Any], *args: Any, annotations: dict[str, Any] | None = None
    ) -> Future:
        wanted = {} if self._plain else dict(annotations or {})
        if not wanted:
            return self._client.submit(function, *args, pure=False)
        with dask.annotate(**wanted):
            return self._client.submit(function, *args, pure=False)

    def _somewhere(self) -> dict[str, Any]:
        """Return an annotation, or none, for a task of one device."""
        chosen = self._random.choice([None, None, None, 0, 1, 2, "cuda:3", "auto"])
        return {} if chosen is None else {"device": chosen}

    def _made(self) -> tuple[Future, int]:
        number, length = self._random.randrange(10**6), SMALL
        if self._random.random() < 0.25:
            length = LARGE
        make = tasks.make_plain if self._plain else tasks.make
        made = self._submit(make, number, length, annotations=self._somewhere())
        return made, tasks.sum_of(number, length)

    def _task(self) -> Iterator[Expected]:
        inputs = self._random.sample(self._values, k=min(len(self._values), 3))
        kind = self._random.choice(
            ["plain"] * 8 + ["later", "host", "carried", "across", "across", "share", "memory"]
            + ["meets OOM", "meets a fault at its end"] * (self._random.random() < 0.2)
        )  # fmt: skip
        if self._calm and kind.startswith("meets"):
            kind = "plain"
        if kind == "across":
            inputs = inputs[:1]
        arrays = [future for future, _ in inputs]
        value = sum(total for _, total in inputs)
        total = tasks.total_plain if self._plain else tasks.total
        if kind == "later":
            later = tasks.total_later_plain if self._plain else tasks.total_later
            future = self._submit(later, *arrays, annotations=self._somewhere())
        elif kind == "host":
            on_host = tasks.total_plain if self._plain else tasks.total_on_host
            future = self._submit(on_host, *arrays, annotations={"device": "none"})
        elif kind == "carried":
            device = self._random.randrange(4)
            carried = total if self._plain else on_device(device)(total)
            future = self._submit(carried, *arrays)
        elif kind == "across":
            across = tasks.total_across_plain if self._plain else tasks.total_across
            future = self._submit(across, *arrays, 2, annotations={"devices": 2})
        elif kind == "share":
            share = self._random.choice([0.1, 0.25, 0.5])
            future = self._submit(total, *arrays, annotations={"device_share": share})
        elif kind == "memory":
            memory = self._random.choice(["1 MiB", "4 MiB"])
            future = self._submit(total, *arrays, annotations={"device_memory": memory})
        elif kind.startswith("meets"):
            fault = {
                "meets OOM": ("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY, False),
            }.get(kind, ("cuCtxSetCurrent", CUresult.CUDA_ERROR_INVALID_CONTEXT, True))
            future = self._submit(tasks.meet, *fault, *arrays, annotations={"retries": RETRIES})
        else:
            future = self._submit(total, *arrays, annotations=self._somewhere())
        yield Expected(future, kind, value)
        if self._random.random() < self._guilty / self.size:
            after_s = self._random.choice([0, 0.01, 0.1])
            yield Expected(self._submit(tasks.break_device, after_s), GUILTY, None)

    # -- the results

    def _wait(self, patience_s: float, is_lost: Callable[[], bool]) -> None:
        futures = [one.future for one in self._expected]
        until, left = time.monotonic() + patience_s, len(futures)
        while True:
            try:
                wait(futures, timeout=5)
                return
            except TimeoutError:
                pass
            except CancelledError as error:
                raise Restarted from error
            if is_lost():  # dask's client may never say so: a submit disturbs its reconnection
                raise Restarted
            done = sum(future.done() for future in futures)
            if len(futures) - done < left:
                until, left = time.monotonic() + patience_s, len(futures) - done
            elif time.monotonic() > until:
                raise Hang(self._stuck())

    def _stuck(self) -> str:
        waiting = [one for one in self._expected if not one.future.done()]
        kinds = Counter(one.kind for one in waiting)
        such = [str(one.future.key) for one in waiting[:1]]
        return f"batch {self.name}: {dict(kinds)}, such as {such}"

    def _gathered(self, patience_s: float) -> dict[Any, Any]:
        """Return the results of all tasks that did not err, by key; none if one errs meanwhile."""
        left = (one.future for one in self._expected if one.kind != GUILTY)
        good = {future.key: future for future in left if future.status != "error"}
        gather = functools.partial(self._client.gather, good, asynchronous=True)
        try:
            return dict(self._client.sync(gather, callback_timeout=patience_s))
        except TimeoutError:
            raise Hang(self._stuck()) from None
        except Exception:
            return {}  # each result is asked for by itself

    def _outcome(
        self, one: Expected, gathered: Mapping[Any, Any], patience_s: float
    ) -> tuple[str, str]:
        key = one.future.key
        if one.kind == GUILTY:
            return self._guilt(one.future, patience_s)
        try:
            found = gathered[key] if key in gathered else one.future.result(timeout=patience_s)
        except CancelledError as error:
            raise Restarted from error
        except Exception as error:
            if one.future.status == "error":
                return "innocent error", f"{key}: {error!r}"
            if isinstance(error, TimeoutError):
                raise Hang(self._stuck()) from None
            raise Restarted from error  # the connection to the scheduler ended
        if found != one.value:
            return "wrong", f"{key}: {found}, not {one.value}"
        return "right", ""

    def _guilt(self, future: Future, patience_s: float) -> tuple[str, str]:
        """A guilty task errs some time after it counted as done; it is its only suspect then."""
        until = time.monotonic() + patience_s
        while future.status != "error":
            if future.status in {"cancelled", "lost"}:
                raise Restarted
            if time.monotonic() > until:
                return "not found", f"{future.key} is {future.status}"
            time.sleep(0.02)
        error = future.exception()
        if not isinstance(error, DeviceFailedError):
            return "other error", f"{future.key}: {error!r}"
        if len(error.suspects) != 1 or not error.suspects[0].startswith(str(future.key)):
            return "wrong suspects", f"{future.key}: {error.suspects}"
        return "found", ""
