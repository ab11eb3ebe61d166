"""Batches of random tasks with known results."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client, Future

from dask_devctx import DeviceFailedError
from tests.soak.choices import GUILTY, Choices, Input, Task

LOOK_S = 0.05


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
    """Random tasks, the same for the same seed and number."""

    def __init__(
        self,
        seed: int,
        number: int,
        size: int,
        *,
        guilty: float,
        plain: bool,
        calm: bool,
        devices: int,
    ) -> None:
        self.name, self.size = f"{seed}.{number}", size
        self._plain = plain
        # The same choices each time that it is submitted.
        self._choices = Choices(
            self.name, size, guilty=guilty, plain=plain, calm=calm, devices=devices
        )
        self._expected: list[Expected] = []
        self._arrays: list[Future] = []

    @property
    def arrays(self) -> int:
        """How many of its tasks give arrays; each of them is in the sum of another task."""
        return len(self._choices.made) + len(self._choices.changed)

    def submit(self, client: Client) -> None:
        """Submit all tasks; again, if they were submitted before."""
        self._client = client
        chosen = self._choices
        self._arrays = self._submit(chosen.made, [])
        self._arrays += self._submit(chosen.changed, self._arrays)
        futures = self._submit(chosen.totals, self._arrays)
        self._expected = [
            Expected(future, one.kind, one.value)
            for future, one in zip(futures, chosen.totals, strict=True)
        ]

    def check(
        self, patience_s: float, is_lost: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[str, str, str]]:
        """Wait for all tasks; yield the kind of each, its outcome and more words."""
        self._wait(patience_s, is_lost)
        gathered = self._gathered(patience_s)
        for one in self._expected:
            yield one.kind, *self._outcome(one, gathered, patience_s)

    def release(self) -> None:
        """Let the results go."""
        self._expected, self._arrays = [], []

    def _submit(self, chosen: Sequence[Task], arrays: Sequence[Future]) -> list[Future]:
        """Submit tasks, in one graph those that differ in their arguments only."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, one in enumerate(chosen):
            of_its_own = number if one.alone else None
            shape = (one.function, len(one.args), *sorted(one.annotations.items()), of_its_own)
            groups[shape].append(number)
        futures: dict[int, Future] = {}
        for numbers in groups.values():
            first = chosen[numbers[0]]
            rows = [
                [arrays[arg.number] if isinstance(arg, Input) else arg for arg in chosen[n].args]
                for n in numbers
            ]
            with dask.annotate(**({} if self._plain else first.annotations)):
                if first.alone:
                    submitted = [self._client.submit(first.function, *rows[0], pure=False)]
                else:
                    columns = zip(*rows, strict=True)
                    submitted = self._client.map(first.function, *columns, pure=False)
            futures.update(zip(numbers, submitted, strict=True))
        return [futures[number] for number in range(len(chosen))]

    # -- the results

    def _wait(self, patience_s: float, is_lost: Callable[[], bool]) -> None:
        left = [one.future for one in self._expected]
        until = time.monotonic() + patience_s
        while True:
            waiting = [future for future in left if not future.done()]
            # Dask's client may never say that tasks were lost: a submit disturbs its reconnection.
            if is_lost() or any(future.cancelled() for future in left):
                raise Restarted
            if not waiting:
                return
            if len(waiting) < len(left):
                until = time.monotonic() + patience_s
            elif time.monotonic() > until:
                raise Hang(self._stuck())
            left = waiting
            time.sleep(LOOK_S)

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
