"""Values that cannot be read when they arrive: the tasks that need them fail with the error."""

from __future__ import annotations

from collections.abc import Hashable

from distributed.comm import CommClosedError

from dask_devctx.dask_internals.connections import UNREAD


def could_not_be_read(key: Hashable, error: Exception, sender: str, *, device_failed: bool) -> None:
    """Note that a value could not be read, for the tasks that need it; else raise the error.

    Raises
    ------
    CommClosedError
        A device here failed. The value is well, and another worker can read it.
    """
    error = error.with_traceback(None)
    if device_failed:
        raise CommClosedError(f"{key!r} from {sender} could not be read: {error}") from error
    error.add_note(f"{key!r} could not be read when it arrived from {sender}")
    unread = UNREAD.get()
    if unread is None:  # no task asked
        raise error
    unread[key] = error
