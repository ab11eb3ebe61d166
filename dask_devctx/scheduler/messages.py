"""The messages between workers and the scheduler; a handler's signature is a message's content.

Each message of a worker has its address and the number of the protocol. The scheduler answers that
it refuses another number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

from dask_devctx.errors import DeviceFailedError

# Raise it where the content of a message, also between workers, or of a row of history changes.
PROTOCOL: Final = 14
# The scheduler's plugin, by its name there.
ROUTING: Final = "devctx-routing"
# The handlers that workers call on the scheduler.
ANNOUNCE: Final = "devctx_announce"
REFUSE: Final = "devctx_refuse"
# A worker asks for the devices that are its own.
CLAIM: Final = "devctx_claim"
# All blocks of a P2P rechunk are kept: the tasks that make its output may run.
RECHUNK: Final = "devctx_rechunk"
# A worker's tasks wait long. The answer: those that idle workers get when it gives them back.
LATE: Final = "devctx_late"
# A worker's devices failed: the message, and the topic and the action of an event that says the
# same; see :mod:`dask_devctx.worker.failures.shutdown`.
FAILED: Final = "devctx_device_failed"
TOPIC: Final = "devctx"
ACTION: Final = "device-failed"
# The message that a worker answers with its history.
HISTORY: Final = "devctx_history"
# The most rows of one kind in one answer, so that neither event loop is held for long.
ANSWER_LIMIT: Final = 5_000


class Failure(NamedTuple):
    """A failure of a worker's devices: the fields of its :class:`~dask_devctx.DeviceFailedError`.

    ``suspects`` may have caused it, ``bystanders`` run again too, and ``erred`` err with it: each
    is a key, and why its task does not run again or "".
    """

    fields: Sequence[Any]
    suspects: Sequence[Hashable]
    bystanders: Sequence[Hashable]
    erred: Sequence[tuple[Hashable, str]]

    @property
    def error(self) -> DeviceFailedError:
        """The error, of no task in particular."""
        return DeviceFailedError(*self.fields)

    def error_for(self, not_again: str) -> DeviceFailedError:
        """Return the error of a task that does not run again, for a reason or as its cause."""
        return DeviceFailedError(*[*self.fields[:-1], not_again])

    def error_of(self, key: Hashable) -> DeviceFailedError | None:
        """Return the error of a task that errs with the failure; None for any other task."""
        return next((self.error_for(why) for one, why in self.erred if one == key), None)
