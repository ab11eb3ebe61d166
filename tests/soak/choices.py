"""The random tasks of a batch, and the right value of each."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings.driver import CUresult

from dask_devctx import on_device
from tests.soak import tasks
from tests.soak.hosts import WORKERS

# Elements of 8 bytes.
SMALL, LARGE = 256, 65_536
LARGE_ONES = 0.06
# Some tasks meet a fault of the driver that is not theirs to handle, and are tried again by dask.
RETRIES = 20
GUILTY = "guilty"
KINDS = ["plain"] * 8 + ["later", "host", "carried", "across", "across", "share", "memory"]
FAULTS = {
    "meets OOM": ("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY, False),
    "meets a fault at its end": ("cuCtxSetCurrent", CUresult.CUDA_ERROR_INVALID_CONTEXT, True),
}


@dataclass(frozen=True)
class Input:
    """The value of an earlier task of the batch, by its number."""

    number: int


@dataclass(frozen=True)
class Task:
    """A task, and the value that is right: of an array, its sum. An `Input` is an earlier task."""

    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    value: Any
    annotations: dict[str, Any] = field(default_factory=dict)
    alone: bool = False


class Choices:
    """Random tasks, the same for the same name."""

    def __init__(
        self, name: str, size: int, *, guilty: float, plain: bool, calm: bool, devices: int
    ) -> None:
        self._random = random.Random(name)
        self._plain, self._calm, self._devices = plain, calm, devices
        made, changed = size * 3 // 10, size * 2 // 10
        self.made = [self._made() for _ in range(made)]
        deck = self._deck(self.made)
        self.changed = [self._changed(next(deck)) for _ in range(changed)]
        arrays = [*self.made, *self.changed]
        deck = self._deck(arrays)
        self.totals = [self._total(arrays, deck) for _ in range(size - made - changed)]
        if not calm and self._random.random() < guilty:
            broken = Task(
                GUILTY, tasks.break_device, (self._random.choice([0, 0.01, 0.1]),), None, alone=True
            )
            self.totals.insert(self._random.randrange(len(self.totals)), broken)

    def _deck(self, arrays: list[Task]) -> Iterator[Input]:
        """Yield all inputs in random order, again and again."""
        cards = [Input(number) for number in range(len(arrays))]
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
        length = LARGE if self._random.random() < LARGE_ONES else SMALL
        make = tasks.make_plain if self._plain else tasks.make
        value = tasks.sum_of(number, length)
        return Task("made", make, (number, length), value, self._somewhere(), self._alone())

    def _changed(self, one: Input) -> Task:
        change = tasks.change_plain if self._plain else tasks.change
        made = self.made[one.number]
        value = made.value + made.args[1]
        return Task("changed", change, (one,), value, self._somewhere(), self._alone())

    def _total(self, arrays: list[Task], deck: Iterator[Input]) -> Task:
        inputs = [next(deck) for _ in range(self._random.choice([1, 1, 1, 2, 2, 3]))]
        kind = self._random.choice(KINDS + list(FAULTS) * (self._random.random() < 0.05))
        if (self._calm and kind in FAULTS) or (kind == "across" and self._devices < 2 * WORKERS):
            kind = "plain"  # no worker has two devices where the host has fewer than four
        if kind == "across":
            inputs = inputs[:1]
        value = sum(arrays[one.number].value for one in inputs)
        function, args, annotations = self._call(kind, inputs)
        return Task(kind, function, args, value, annotations, self._alone())

    def _call(
        self, kind: str, inputs: list[Input]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return a function, its arguments and its annotations."""
        choice, total = self._random.choice, tasks.total_plain if self._plain else tasks.total
        if kind == "later":
            later = tasks.total_later_plain if self._plain else tasks.total_later
            return later, (*inputs,), self._somewhere()
        if kind == "host":
            on_host = tasks.total_plain if self._plain else tasks.total_on_host
            return on_host, (*inputs,), {"device": "none"}
        if kind == "carried":
            return (total if self._plain else carried(choice(range(self._devices)))), (*inputs,), {}
        if kind == "across":
            across = tasks.total_across_plain if self._plain else tasks.total_across
            return across, (*inputs, 2), {"devices": 2}
        if kind == "share":
            return total, (*inputs,), {"device_share": choice([0.1, 0.25, 0.5])}
        if kind == "memory":
            return total, (*inputs,), {"device_memory": choice(["1 MiB", "4 MiB"])}
        if kind in FAULTS:
            return tasks.meet, (*FAULTS[kind], *inputs), {"retries": RETRIES}
        return total, (*inputs,), self._somewhere()


@functools.cache
def carried(device: int) -> Callable[..., int]:
    """Return a function that takes its device with it."""
    return on_device(device)(tasks.total)
