"""What a name stands for, from one value to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dask_devctx.cuda.device import Device
    from dask_devctx.transfer import Stamp


class Lifetime:
    """One value's time under a name: from when the name stands for it until it is let go.

    A key of copies that is forgotten for good. Threads may still have the value then, and ask for
    it: they get copies that nobody keeps. So no copy stays that nobody will ever forget, and none
    is taken for that of the next value of the same name.

    Parameters
    ----------
    after
        Stamp of the work that makes the value, where one is known.

    Attributes
    ----------
    copied
        Whether there may be copies of it: set before ``ended`` is looked at to keep one, so that
        whoever ends it and finds this unset has none to drop.
    ended
        Whether it was forgotten.
    places
        Its bytes on which devices, all of them counted; None where nobody has looked yet.
    """

    __slots__ = ("after", "copied", "ended", "places")

    def __init__(self, after: Stamp | None = None) -> None:
        self.after = after
        self.copied = False
        self.ended = False
        self.places: Mapping[Device, int] | None = None if after is None else after.places
