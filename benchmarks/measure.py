"""Interleaved rounds, and their statistics."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from benchmarks.case import Case, Contender, ContenderFailedError, Measured, Size

_LONG_S = 2.0


class Spread(NamedTuple):
    """The median, with the quartiles around it."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def measure(case: Case, size: Size) -> list[Measured]:
    """Measure the contenders of a case, in turn, round after round.

    The order changes from round to round, so that no contender always follows the same neighbour.
    Garbage is collected between turns and not within them. A contender that fails gets no more
    turns, and loses its earlier values. Long turns are told as they end: a run that is interrupted
    has shown them.
    """
    taking_part = [_Part(one) for one in case.contenders]
    for part in taking_part:
        part.warm_up(0.0 if case.single else size.round_s)
    gc.collect()
    gc.freeze()  # collections before each turn skip the objects of imported libraries
    for turn in range(size.more * (case.rounds or size.rounds)):
        for place in range(len(taking_part)):
            part = taking_part[(place + turn) % len(taking_part)]
            if not part.failed and (not part.values or part.spent_s < size.more * case.cap_s):
                part.turn()
    gc.unfreeze()
    ours = next(part for part in taking_part if part.contender.role == "ours")
    return [
        Measured(part.contender, part.values, ratios(ours.values, part.values), part.failed)
        for part in taking_part
    ]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ours divided by theirs, for each round in which both had a turn."""
    return [
        o / it if it else 1.0 if o == it else math.inf for o, it in zip(ours, theirs, strict=False)
    ]


def verdict(measured: Sequence[Measured]) -> Measured | None:
    """Return the fastest peer that does the whole job; None if there is none."""
    peers = (m for m in measured if m.contender.role == "peer" and m.contender.counts and m.values)
    return min(peers, key=lambda m: statistics.median(m.values), default=None)


class _Part:
    """A contender that takes part."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self.values: list[float] = []
        self.failed = ""
        self.spent_s = 0.0
        self._count = 1

    def warm_up(self, round_s: float) -> None:
        with self._noting("first"):
            self._count = _repetitions(self.contender, round_s)

    def turn(self) -> None:
        started = time.perf_counter()
        with self._noting("next"):
            self.values.append(_turn(self.contender, self._count))
        self.spent_s += time.perf_counter() - started

    @contextlib.contextmanager
    def _noting(self, turn: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except ContenderFailedError as error:
            self.failed = str(error)
            self.values.clear()
        took = time.perf_counter() - started
        if took > _LONG_S:
            end = "failed after" if self.failed else "took"
            click.echo(f"  {self.contender.name}: the {turn} turn {end} {took:.1f} s", err=True)


def _repetitions(contender: Contender, round_s: float) -> int:
    """Return how many repetitions fill a turn; this also warms the contender up."""
    count = 1
    while True:
        started = time.perf_counter()
        contender.run(count)
        if time.perf_counter() - started >= round_s:
            return count
        count *= 2


def _turn(contender: Contender, count: int) -> float:
    gc.collect()
    gc.disable()
    try:
        return contender.run(count) / count
    finally:
        gc.enable()
