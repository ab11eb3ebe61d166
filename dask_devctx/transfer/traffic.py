"""Counts of the copies from one device to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """The traffic from one device to another.

    Attributes
    ----------
    nbytes, copies
        The number of bytes moved, and of inputs copied.
    saved
        How many times a task found a copy of its input there already.
    seconds
        Time that threads spent on starting the copies; they do not wait for the end.
    """

    nbytes: int = 0
    copies: int = 0
    saved: int = 0
    seconds: float = 0.0
