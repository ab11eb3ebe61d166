"""The name that a mistyped one probably means, for messages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable

_told: set[str] = set()


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is the most like another one; "" if none is like it.

    Parameters
    ----------
    cutoff
        The least likeness of the two names, from 0 to 1: see :func:`difflib.get_close_matches`.
    """
    import difflib  # only messages need it

    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), "")


def about_unknown(key: str, known: Collection[str]) -> str | None:
    """Return a sentence about a key that the section ``devctx`` does not have; None if it does."""
    name = key.lower().replace("_", "-")
    if name in known:
        return None
    near = nearest(name, known)
    meant = f"; devctx.{near}?" if near else ""
    return f"there is no devctx.{name} (in the environment {variable(key)}){meant}"


def variable(key: str) -> str:
    """Return the environment variable of a key of the section ``devctx``."""
    return f"DASK_DEVCTX__{key.upper().replace('-', '_')}"


def warn_of_variables(known: Collection[str]) -> None:
    """Warn of variables of the environment that set nothing, of each once in a process."""
    for name in os.environ:
        prefix, key = name[: len(variable(""))], name[len(variable("")) :]
        text = about_unknown(key, known) if prefix == variable("") else None
        if text is not None and text not in _told:
            _told.add(text)
            warnings.warn(text, stacklevel=3)


def is_told(text: str) -> bool:
    """Return whether :func:`warn_of_variables` has warned with this text."""
    return text in _told
