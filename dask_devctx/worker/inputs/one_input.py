"""One input of a task, and where it lives."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING

from dask_devctx.cuda.device import Device
from dask_devctx.transfer import nbytes_by_device
from dask_devctx.worker.memory.kept import Kept

if TYPE_CHECKING:
    from dask_devctx.worker.inputs.inputs import Inputs

logger = logging.getLogger(__name__)


class Input:
    """One input of a task. Its place is looked up once, on first use.

    Parameters
    ----------
    key, value
        The value, and its key.
    inputs
        Knows the copies of the value; None if no copies are made.
    """

    __slots__ = ("_inputs", "_nbytes", "key", "value")

    def __init__(self, key: Hashable, value: object, inputs: Inputs | None) -> None:
        self.key = key
        self.value = value
        self._inputs = inputs
        self._nbytes: Mapping[Device, int] | None = None

    @property
    def nbytes(self) -> Mapping[Device, int]:
        """The approximate bytes of the value on each device; empty for a value on the host.

        It is empty too if a user's type raises: the task looks again when it gets the value, and
        fails with that error. Of a large value that was not looked at before, this looks only at a
        part, for less than a millisecond: the task looks again.
        """
        if self._nbytes is None:
            if isinstance(self.value, Kept):
                return self.value.places  # it changes
            lifetime = None if self._inputs is None else self._inputs.lifetimes.get(self.key)
            if lifetime is not None and lifetime.places is not None:
                self._nbytes = lifetime.places
                return self._nbytes
            try:
                self._nbytes, complete = nbytes_by_device.estimated(self.value)
            except Exception:
                logger.debug("the devices of %r are unknown", self.key, exc_info=True)
                self._nbytes, complete = {}, False
            if complete and lifetime is not None:
                lifetime.places = self._nbytes
        return self._nbytes

    @property
    def copies(self) -> Collection[Device]:
        """The devices that have a copy of it."""
        return () if self._inputs is None else self._inputs.copies_of(self.key)
