"""Batches of random tasks with known results."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import dask
from cuda.bindings.driver import CUresult
from distributed import Client, Future

from dask_devctx import DeviceFailedError, on_device
from tests.soak import tasks
from tests.soak.hosts import WORKERS

# Elements of 8 bytes.
SMALL, LARGE = 256, 65_536
# Some tasks meet a fault of the driver that is not theirs to handle, and are tried again by dask.
RETRIES = 20
GUILTY = "guilty"
KINDS = ["plain"] * 8 + ["later", "host", "carried", "across", "across", "share", "memory"]
FAULTS = {
    "meets OOM": ("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY, False),
    "meets a fault at its end": ("cuCtxSetCurrent", CUresult.CUDA_ERROR_INVALID_CONTEXT, True),
}


class Restarted(Exception):
    """The scheduler was restarted, so the batch has to be submitted again."""


class Hang(Exception):
    """A batch made no progress; the text shows its tasks."""


@dataclass
class Task:
    """A task, and the value that is right: of an array, its sum. ``inputs`` are earlier tasks."""

    kind: str
    function: Callable[..., Any]
    value: Any
    args: tuple[Any, ...] = ()
    inputs: tuple[int, ...] = ()
    annotations: dict[str, Any] = field(default_factory=dict)
    alone: bool = False


class Batch:
    """Random tasks, the same for the same seed and number, and each time it is submitted."""

    def __init__(
        self, seed: int, number: int, size: int, devices: int, guilty: float, calm: bool = False
    ) -> None:
        self.name, self.size, self._devices = f"{seed}.{number}", size, devices
        self._random = random.Random(self.name)
        made, changed = size * 3 // 10, size * 2 // 10
        self._tasks = [self._made() for _ in range(made)]
        deck = self._deck()
        self._tasks += [self._changed(next(deck)) for _ in range(changed)]
        self.arrays = len(self._tasks)  # each of them is in the sum of another task
        deck = self._deck()
        totals = [self._total(deck, calm) for _ in range(size - self.arrays)]
        if not calm and self._random.random() < guilty:
            after_s = self._random.choice([0, 0.01, 0.1])
            broken = Task(GUILTY, tasks.break_device, None, (after_s,), alone=True)
            totals.insert(self._random.randrange(len(totals)), broken)
        self._tasks += totals
        self._futures: list[Future] = []

    def _deck(self) -> Iterator[int]:
        """Yield all tasks so far in random order, again and again."""
        cards = list(range(len(self._tasks)))
        while True:
            self._random.shuffle(cards)
            yield from cards

    def _alone(self) -> bool:
        return self._random.random() < 0.03

    def _somewhere(self) -> dict[str, Any]:
        """Return an annotation, or none, for a task of one device."""
        *ordinals, last = range(self._devices)
        chosen = self._random.choice([None, None, None, *ordinals, f"cuda:{last}", "auto"])
        return {} if chosen is None else {"device": chosen}

    def _made(self) -> Task:
        number = self._random.randrange(10**6)
        length = LARGE if self._random.random() < 0.06 else SMALL
        value = length * (length - 1) // 2 + length * number
        given = (number, length)
        return Task("made", tasks.make, value, given, (), self._somewhere(), self._alone())

    def _changed(self, one: int) -> Task:
        value = self._tasks[one].value + self._tasks[one].args[1]
        return Task("changed", tasks.change, value, (), (one,), self._somewhere(), self._alone())

    def _total(self, deck: Iterator[int], calm: bool) -> Task:
        choice = self._random.choice
        inputs = [next(deck) for _ in range(choice([1, 1, 1, 2, 2, 3]))]
        kind = choice(KINDS + list(FAULTS) * (not calm and self._random.random() < 0.05))
        if kind == "across" and self._devices < 2 * WORKERS:
            kind = "plain"  # no worker has two devices where the host has fewer than four
        if kind == "across":
            inputs = inputs[:1]
        value = sum(self._tasks[one].value for one in inputs)
        # A function, arguments before the inputs, and annotations.
        called: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
            "plain": (tasks.total, (), self._somewhere()),
            "later": (tasks.total_later, (), self._somewhere()),
            "host": (tasks.total_on_host, (), {"device": "none"}),
            "carried": (carried(choice(range(self._devices))), (), {}),
            "across": (tasks.total_across, (), {"devices": 2}),
            "share": (tasks.total, (), {"device_share": choice([0.1, 0.25, 0.5])}),
            "memory": (tasks.total, (), {"device_memory": choice(["1 MiB", "4 MiB"])}),
            **{name: (tasks.meet, given, {"retries": RETRIES}) for name, given in FAULTS.items()},
        }
        function, args, annotations = called[kind]
        return Task(kind, function, value, args, tuple(inputs), annotations, self._alone())

    # -- submitting

    def submit(self, client: Client) -> None:
        """Submit all tasks; again, if they were submitted before."""
        self._client, self._futures = client, []
        for kinds in ({"made"}, {"changed"}, None):
            rest = self._tasks[len(self._futures) :]
            self._submit([one for one in rest if kinds is None or one.kind in kinds])

    def _submit(self, chosen: Sequence[Task]) -> None:
        """Submit tasks, in one graph those that differ in their arguments only."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, one in enumerate(chosen):
            of_its_own = number if one.alone else None
            shape = (one.function, len(one.inputs), *sorted(one.annotations.items()), of_its_own)
            groups[shape].append(number)
        futures: dict[int, Future] = {}
        for numbers in groups.values():
            first = chosen[numbers[0]]
            rows = [
                [*chosen[n].args, *(self._futures[one] for one in chosen[n].inputs)]
                for n in numbers
            ]
            if first.function is tasks.total_across:
                rows = [[*row, first.annotations["devices"]] for row in rows]
            with dask.annotate(**first.annotations):
                if first.alone:
                    submitted = [self._client.submit(first.function, *rows[0], pure=False)]
                else:
                    columns = zip(*rows, strict=True)
                    submitted = self._client.map(first.function, *columns, pure=False)
            futures.update(zip(numbers, submitted, strict=True))
        self._futures += [futures[number] for number in range(len(chosen))]

    # -- the results

    def check(
        self, patience_s: float, is_lost: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[str, str, str]]:
        """Wait for all tasks; yield the kind of each, its outcome and more words."""
        ends = list(zip(self._tasks, self._futures, strict=True))[self.arrays :]
        self._wait([future for _, future in ends], patience_s, is_lost)
        gathered = self._gathered([f for one, f in ends if one.kind != GUILTY], patience_s)
        for one, future in ends:
            outcome = self._guilt if one.kind == GUILTY else self._outcome
            yield one.kind, *outcome(one, future, gathered, patience_s)

    def release(self) -> None:
        """Let the results go."""
        self._futures = []

    def _wait(self, left: list[Future], patience_s: float, is_lost: Callable[[], bool]) -> None:
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
                raise self._hang()
            left = waiting
            time.sleep(0.05)

    def _hang(self) -> Hang:
        waiting = [
            (one.kind, future.key)
            for one, future in zip(self._tasks, self._futures, strict=True)
            if not future.done()
        ]
        kinds = Counter(kind for kind, _ in waiting)
        return Hang(f"batch {self.name}: {dict(kinds)}, such as {waiting[:1]}")

    def _gathered(self, futures: list[Future], patience_s: float) -> dict[Any, Any]:
        """Return the results of all tasks that did not err, by key; none if one errs meanwhile."""
        good = {future.key: future for future in futures if future.status != "error"}
        gather = functools.partial(self._client.gather, good, asynchronous=True)
        try:
            return dict(self._client.sync(gather, callback_timeout=patience_s))
        except TimeoutError:
            raise self._hang() from None
        except Exception:
            return {}  # each result is asked for by itself

    def _outcome(
        self, one: Task, future: Future, gathered: dict[Any, Any], patience_s: float
    ) -> tuple[str, str]:
        key = future.key
        try:
            found = gathered[key] if key in gathered else future.result(timeout=patience_s)
        except CancelledError as error:
            raise Restarted from error
        except Exception as error:
            if future.status == "error":
                return "innocent error", f"{key}: {error!r}"
            if isinstance(error, TimeoutError):
                raise self._hang() from None
            raise Restarted from error  # the connection to the scheduler ended
        return ("right", "") if found == one.value else ("wrong", f"{key}: {found}, {one.value}")

    def _guilt(
        self, one: Task, future: Future, gathered: dict[Any, Any], patience_s: float
    ) -> tuple[str, str]:
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


@functools.cache
def carried(device: int) -> Callable[..., int]:
    """Return a function that takes its device with it."""
    return on_device(device)(tasks.total)
