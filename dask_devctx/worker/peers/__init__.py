"""Transfers of values on a device to other workers: by CUDA IPC inside a machine, with any comm.

dask's own messages name the place where the sender has staged the values. The receiver reads them
from there before it passes the answer on. So dask's "OK" means that the sender may use the staging
memory again. Where a pair of workers cannot do that, dask's comm carries the values:
:mod:`.transport` has the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from tornado.ioloop import PeriodicCallback

from dask_devctx.dask_internals.connections import (
    answering,
    asking_by,
    tasks_fail_with_unread_inputs,
)
from dask_devctx.dask_internals.worker import messages_of, told_after, wrapped_handler
from dask_devctx.worker.peers import receive, send
from dask_devctx.worker.peers.transfers import CLOSE, PeerTransfers

_LOOK_EVERY_MS: Final = 5_000
# dask asks a worker for 50 MB at a time, and has one such question under way to each worker. A
# question takes milliseconds; between devices, 50 MB take a fifth of one.
_MESSAGE_NBYTES: Final = 10**9
_AT_A_TIME: Final = 4  # so many of them have room


@contextmanager
def exchanging(transfers: PeerTransfers) -> Iterator[None]:
    """While it is open, a worker's values on devices leave and arrive without the host.

    Afterwards, transfers are dask's; those under way are completed.
    """
    worker, looking = transfers.worker, PeriodicCallback(transfers.give_back_unused, _LOOK_EVERY_MS)
    with ExitStack() as steps:
        steps.callback(transfers.end)
        if stagings := transfers.stagings.values():
            most = min(staging.limit for staging in stagings) // _AT_A_TIME
            steps.enter_context(answering(worker, {CLOSE: transfers.close_buffers}))
            steps.enter_context(told_after(worker, "remove-worker", transfers.forget))
            steps.enter_context(messages_of(worker, min(_MESSAGE_NBYTES, most)))
        steps.enter_context(tasks_fail_with_unread_inputs(worker))
        steps.enter_context(asking_by(worker, partial(receive.ask, transfers)))
        if transfers.devices:
            answer = partial(send.answering, transfers)
            steps.enter_context(wrapped_handler(worker, "get_data", answer))
        looking.start()
        steps.callback(looking.stop)
        yield
