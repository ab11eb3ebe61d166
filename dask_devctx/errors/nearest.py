"""The name that a mistyped one probably means, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is the most like another one; "" if none is like it.

    Parameters
    ----------
    cutoff
        The least likeness of the two names, from 0 to 1: see :func:`difflib.get_close_matches`.
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), "")
