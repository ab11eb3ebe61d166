"""The parts of a subject: its cases, and the contenders of each case."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["ours", "variant", "peer", "floor"]


class CannotRunError(Exception):
    """This machine lacks something that a subject needs."""


class ContenderFailedError(Exception):
    """A contender fails at its job, or does not answer in time."""


@dataclass(frozen=True)
class Contender:
    """One way of doing a case's job, which is measured.

    Parameters
    ----------
    name
        Its name in the tables.
    run
        A function that takes a count, does the job so many times, and returns the total: seconds,
        or the unit that the case measures.
    role
        ``"ours"``: dask-devctx, the numerator of all ratios, once in a case. ``"variant"``:
        dask-devctx in another way. ``"peer"``: another library. ``"floor"``: a lower bound for all.
    counts
        Whether it does the whole job, so that a target may be set against it.
    remark
        A note that a reader needs for the comparison.
    at_most
        The target: ours divided by this contender is this number or less.
    at_most_more
        The target: ours minus this contender is this number or less, in the case's unit.
    """

    name: str
    run: Callable[[int], float]
    role: Role = "peer"
    counts: bool = True
    remark: str = ""
    at_most: float | None = None
    at_most_more: float | None = None


@dataclass(frozen=True)
class Missing:
    """A contender that cannot be measured here, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Case:
    """One comparison.

    Parameters
    ----------
    name
        Its name in the tables.
    per
        The name of one repetition, such as ``"with"``.
    unit
        The unit of the result of ``Contender.run``: ``"s"`` or ``"B"``.
    target
        The target: ours divided by the fastest peer that counts is this number or less.
    single
        Whether one repetition is long enough to be a round.
    rounds
        The number of rounds; None for the same number as in other cases.
    cap_s
        A contender gets no more turns once its turns have taken longer than this in total.
    """

    name: str
    per: str
    contenders: Sequence[Contender]
    missing: Sequence[Missing] = ()
    unit: Literal["s", "B"] = "s"
    target: float | None = None
    single: bool = False
    rounds: int | None = None
    cap_s: float = math.inf


@dataclass(frozen=True)
class Size:
    """The amount of measuring.

    Parameters
    ----------
    rounds
        How often each contender has its turn.
    round_s
        The least time of such a turn; 0 for a single repetition.
    tiny
        Whether the run only shows that everything works.
    only
        Texts of which one is in the name of each case to measure; empty for all cases.
    more
        How many times as many rounds, and as much time for them.
    """

    rounds: int
    round_s: float
    tiny: bool = False
    only: tuple[str, ...] = ()
    more: int = 1

    def wants(self, name: str) -> bool:
        """Return whether to measure the case of this name."""
        return not self.only or any(text.casefold() in name.casefold() for text in self.only)


FULL = Size(rounds=31, round_s=0.02)
TINY = Size(rounds=2, round_s=0.0, tiny=True)


@dataclass(frozen=True)
class Measured:
    """A contender's values per repetition, one for each round; or the reason why it has none."""

    contender: Contender
    values: Sequence[float]
    ratios: Sequence[float] = field(default=())  # ours divided by it, round by round
    failed: str = ""
