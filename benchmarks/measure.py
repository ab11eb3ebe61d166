"""Interleaved rounds, and what they amount to."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.case import Case, Contender, Measured, Size


class Spread(NamedTuple):
    """The median, with the quartiles around it."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def measure(case: Case, size: Size) -> list[Measured]:
    """Measure the contenders of a case, in turn, round after round.

    The order is another one in each round, so that nobody always comes after the same neighbour.
    Garbage is collected between turns and not within them.
    """
    counts = [_repetitions(one, 0.0 if case.single else size.round_s) for one in case.contenders]
    values: list[list[float]] = [[] for _ in case.contenders]
    gc.collect()
    gc.freeze()  # what the peers brought along need not be looked through before every turn
    for turn in range(size.rounds):
        for place in range(len(case.contenders)):
            which = (place + turn) % len(case.contenders)
            values[which].append(_turn(case.contenders[which], counts[which]))
    gc.unfreeze()
    ours = next(v for one, v in zip(case.contenders, values, strict=True) if one.role == "ours")
    return [
        Measured(one, found, [o / it for o, it in zip(ours, found, strict=True)])
        for one, found in zip(case.contenders, values, strict=True)
    ]


def verdict(measured: Sequence[Measured]) -> Measured | None:
    """Return the fastest peer that does the whole job, or None where there is none."""
    peers = [m for m in measured if m.contender.role == "peer" and m.contender.counts]
    return min(peers, key=lambda m: statistics.median(m.values), default=None)


def _repetitions(contender: Contender, round_s: float) -> int:
    """How many repetitions fill a turn; doing them also warms the contender up."""
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
