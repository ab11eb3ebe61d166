"""What a subject consists of: cases, and the contenders of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["ours", "variant", "peer", "floor"]


class CannotRunError(Exception):
    """A subject needs what this machine does not have."""


class ContenderFailedError(Exception):
    """A contender does not do what it is measured at, or does not answer in time."""


@dataclass(frozen=True)
class Contender:
    """Something that is measured.

    Parameters
    ----------
    name
        What the tables call it.
    run
        Does it so many times, and returns what all of them together took: seconds, or whatever the
        case measures.
    role
        ``"ours"``: what the ratios are of, one in a case. ``"variant"``: ours in another way.
        ``"peer"``: another library. ``"floor"``: what no contender can be below.
    counts
        Whether it does the whole job, so that a target may be taken against it.
    remark
        What a reader must know to compare it.
    at_most
        Ours divided by this one is to be at most this.
    at_most_more
        Ours less this one is to be at most this, in the case's unit.
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
        What the tables call it.
    per
        What one repetition is, such as ``"with"``.
    unit
        What ``Contender.run`` returns: ``"s"`` or ``"B"``.
    target
        Ours divided by the fastest peer that counts is to be at most this.
    single
        Whether one repetition is long enough to be a round.
    rounds
        How many, where that is not as many as for every other case.
    cap_s
        A contender whose turns have taken longer than this together gets no more of them.
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
    """How much is measured.

    Parameters
    ----------
    rounds
        How often each contender has its turn.
    round_s
        How long such a turn is to take, at least; 0 for a single repetition.
    tiny
        Whether this is only to show that it runs.
    """

    rounds: int
    round_s: float
    tiny: bool = False


FULL = Size(rounds=31, round_s=0.02)
TINY = Size(rounds=2, round_s=0.0, tiny=True)


@dataclass(frozen=True)
class Measured:
    """A contender's values, one per round, each of one repetition; or why it has none."""

    contender: Contender
    values: Sequence[float]
    ratios: Sequence[float] = field(default=())  # ours divided by it, round by round
    failed: str = ""
