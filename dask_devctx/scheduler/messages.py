"""The messages between workers and the scheduler; a handler's signature is a message's content.

Each message of a worker has its address and the number of the protocol. The scheduler answers that
it refuses another number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

# Raise it whenever the content of a message or of a row of the history changes.
PROTOCOL: Final = 5
# The handlers that workers call on the scheduler.
ANNOUNCE: Final = "devctx_announce"
REFUSE: Final = "devctx_refuse"
# A worker asks for the devices that are its own.
CLAIM: Final = "devctx_claim"
# All blocks of a P2P rechunk are kept: the tasks that make its output may run.
RECHUNK: Final = "devctx_rechunk"
# A worker's devices failed: the message, and the topic and the action of an event that says the
# same; see :mod:`dask_devctx.worker.failures.attribution`.
FAILED: Final = "devctx_device_failed"
TOPIC: Final = "devctx"
ACTION: Final = "device-failed"
# The handler on a worker, by which the scheduler changes the worker's devices.
SHARE: Final = "devctx_share"
# The message that a worker answers with its history.
HISTORY: Final = "devctx_history"
# The most rows of one kind in one answer, so that neither event loop is held for long.
ANSWER_LIMIT: Final = 5_000


class Failure(NamedTuple):
    """A failure of a worker's devices: the fields of its :class:`~dask_devctx.DeviceFailedError`.

    ``suspects`` may have caused it, ``bystanders`` run again too, and ``erred`` err with it.
    """

    device: str
    error: str
    fields: Sequence[object]
    suspects: Sequence[Hashable]
    bystanders: Sequence[Hashable]
    erred: Sequence[Hashable]
