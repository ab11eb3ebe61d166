"""A task that is watched over."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Charge(NamedTuple):
    """What is to be known of a task to watch over it.

    Parameters
    ----------
    key
        Its key.
    movable
        Whether it may be tried again on another device: the user named none.
    watched
        Whether it may have broken a device before.
    is_coroutine
        Whether it is a coroutine function's; asked of watched tasks only.
    is_method
        Whether it is a call of an actor's method: it is not waited for, and not run again.
    """

    key: Hashable
    movable: bool
    watched: bool = False
    is_coroutine: bool = False
    is_method: bool = False
