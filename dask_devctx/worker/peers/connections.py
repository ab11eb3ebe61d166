"""A worker's connections to others: each answer is completed, or its connection is closed.

All connections that the worker opens to other workers read and write through this module, and so do
its answers to requests for data.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from distributed.comm import CommClosedError
from distributed.core import clean_exception

from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.dask_internals.connections import (
    UNREAD,
    Connect,
    data_of,
    tasks_fail_with_unread_inputs,
    wrapped_connect,
)
from dask_devctx.dask_internals.worker import wrapped_handler
from dask_devctx.errors import DriverError
from dask_devctx.worker.peers import send
from dask_devctx.worker.peers.local import Local
from dask_devctx.worker.peers.receive import ReadThroughHostError, complete, could_not_be_read

logger = logging.getLogger(__name__)

Message = dict[str, Any]

# Between the address of the worker that asks and what it says, in a field that dask only logs:
# each request says for itself whether its answer can be read.
SAYS: Final = "#"


@contextmanager
def connected(local: Local) -> Iterator[None]:
    """While it is open, a worker's values on devices leave and arrive without the host."""
    # dask returns a connection to its pool also if an answer on it could not be read. But the other
    # side still waits for the confirmation: it takes the next request for this confirmation, and
    # both sides wait without end. Here, such a connection is closed.
    with (
        tasks_fail_with_unread_inputs(local.worker),
        wrapped_connect(local.worker, partial(_around_connect, local)),
        wrapped_handler(local.worker, "get_data", partial(_around_get_data, local)),
    ):
        local.is_open = True
        try:
            yield
        finally:
            local.is_open = False


def _around_connect(local: Local, connect: Connect) -> Connect:
    async def connected(addr: str, timeout: float | None = None) -> Any:
        comm = await connect(addr, timeout)
        asking = getattr(comm.read, "__self__", None)
        if isinstance(asking, _Asking):
            asking.local = local  # an earlier plugin may have made it
        else:
            asking = _Asking(local, comm, addr)
            comm.read, comm.write = asking.read, asking.write
        return comm

    return connected


def _around_get_data(local: Local, get_data: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(comm: Any, keys: Any, who: str | None = None, serializers: Any = None) -> Any:
        address, _, said = (who if isinstance(who, str) else "").partition(SAYS)
        answering = _Answering(comm, partial(send.prepare, local, address, said))
        try:
            return await get_data(
                answering, keys=keys, who=address or None, serializers=serializers
            )
        except Exception as error:
            clear_frames(error)  # dask's log keeps the error: not the values with it
            raise
        finally:
            answering.ended(answering.was_read)

    return answer


class _Asking:
    """A connection on which this worker asks another."""

    def __init__(self, local: Local, comm: Any, address: str) -> None:
        self.local = local
        self._address = address
        self._comm = comm
        self._read, self._write = comm.read, comm.write
        self._request: Message | None = None
        self._answered = False  # by us, over other connections

    async def write(self, msg: Any, *args: Any, **kwargs: Any) -> Any:
        if msg == "OK":  # the values are here; a sender that is gone does not wait for this
            with suppress(CommClosedError):
                return 0 if self._answered else await self._write(msg, *args, **kwargs)
            return 0
        self._request = None
        of = self.local
        if not of.is_open or not isinstance(msg, dict) or msg.get("op") != "get_data":
            return await self._write(msg, *args, **kwargs)
        request, store = msg, of.store()
        said = of.says(self._address)
        # Values for devices may arrive in host memory where they have limits.
        if (said or (store is not None and store.spill.accounts)) and msg.get("who"):
            msg = {**msg, "who": f"{msg['who']}{SAYS}{said}"}
        of.under_way += 1
        try:
            written = await self._write(msg, *args, **kwargs)
        except BaseException:
            of.under_way -= 1
            raise
        self._request = request
        return written

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        request, self._request = self._request, None
        if request is None:
            return await self._read(*args, **kwargs)
        try:
            return await self._answer(request, *args, **kwargs)
        except Exception as error:
            clear_frames(error)  # as above: not what had arrived of the values
            raise
        finally:
            self.local.under_way -= 1

    async def _answer(self, request: Message, *args: Any, **kwargs: Any) -> Any:
        of, address = self.local, self._address
        try:
            msg = await self._read(*args, **kwargs)
            status = msg.get("status") if isinstance(msg, dict) else None
            if status == "OK":
                await complete(of, address, msg)
            elif status == "uncaught-error" and UNREAD.get() is not None:
                raise _could_not_be_sent(address, msg)
            return msg
        except BaseException as error:
            # If a pickle is too short, dask takes its end for the end of the connection.
            too_short = self._comm.closed() and isinstance(error.__context__, EOFError)
            is_lost = not too_short and (isinstance(error, CommClosedError) or self._comm.closed())
            ask_again = isinstance(error, ReadThroughHostError) and not self._comm.closed()
            self._comm.abort()  # the rest of the answer is not read
            if (is_lost and not ask_again) or not isinstance(error, Exception):
                raise
            failure: Any = error.__context__ if too_short else error
        keys, who = list(request["keys"]), request.get("who")
        if not ask_again:
            logger.warning("an answer from %s could not be read", address, exc_info=failure)
            if UNREAD.get() is None:  # no task asked
                raise failure
        clear_frames(failure)
        self._answered = True
        data: dict[Hashable, Any] = {}
        if len(keys) == 1 and not ask_again:
            could_not_be_read(keys[0], failure, address, device_failed=of.has_failed())
        else:  # where some cannot be read, each by itself, to find those
            for some in [keys] if ask_again else [[key] for key in keys]:
                data.update(await data_of(of.worker, address, some, who))
        return {"status": "OK", "data": data}


class _Answering:
    """The connection of a worker that asked for data, while it is answered."""

    def __init__(self, comm: Any, prepare: Callable[[Message], Awaitable[Any]]) -> None:
        self._comm = comm
        self._prepare = prepare
        self.ended: Callable[[bool], None] = lambda was_read: None
        self.was_read = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def write(self, msg: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(msg, dict) and "data" in msg:
            try:
                msg, self.ended = await self._prepare(msg)
            except CommClosedError:
                self._comm.abort()
                raise
        return await self._comm.write(msg, *args, **kwargs)

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        answer = await self._comm.read(*args, **kwargs)
        self.was_read = answer == "OK"
        return answer


def _could_not_be_sent(address: str, msg: Message) -> Any:
    """Return the error of a worker that was asked; what a device there raised passes."""
    _, error, _ = clean_exception(**msg)
    if isinstance(error, DriverError) and not is_out_of_memory(error):
        return CommClosedError(f"{address} could not send values: {error}")
    return error or CommClosedError(f"{address} could not send values")
