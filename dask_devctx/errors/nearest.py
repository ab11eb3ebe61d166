"""The name that a mistyped one probably means, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return the known name that is the most like another one; "" if none is like it.

    ``alike`` is how much of the names must agree, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1, alike)), "")
