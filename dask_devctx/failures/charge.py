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
    """

    key: Hashable
    movable: bool
    watched: bool = False
    is_coroutine: bool = False
