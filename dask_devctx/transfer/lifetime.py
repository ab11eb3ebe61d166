"""The lifetimes of values under one name, which may mean one value after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dask_devctx.cuda.device import Device
    from dask_devctx.transfer import Stamp


class Lifetime:
    """One value's time under a name: from its start until the name is forgotten.

    It is a key for copies, and ends for good. Threads may still have the value after the end and
    ask for it: they get copies that are not kept. So no copy stays without an owner that will
    forget it, and the next value of the same name never gets a copy of this one.

    Parameters
    ----------
    after
        Stamp of the work that makes the value, if one is known.

    Attributes
    ----------
    copied
        Whether copies of the value may exist. It is set before ``ended`` is read to keep a copy: if
        it is unset at the end, there is no copy to drop.
    ended
        Whether the value was forgotten.
    places
        The value's bytes per device, all of them counted; None before the first count.
    """

    __slots__ = ("after", "copied", "ended", "places")

    def __init__(self, after: Stamp | None = None) -> None:
        self.after = after
        self.copied = False
        self.ended = False
        self.places: Mapping[Device, int] | None = None if after is None else after.places
