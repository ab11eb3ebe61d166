"""A worker's connections to others: each answer is completed, or its connection is closed.

All connections that the worker opens to other workers read and write through this module, and so do
its answers to requests for data.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Protocol

from distributed import Worker
from distributed.comm import CommClosedError

from dask_devctx.cuda.out_of_memory import clear_frames
from dask_devctx.dask_internals.connections import (
    UNREAD,
    Connect,
    data_of,
    tasks_fail_with_unread_inputs,
    wrapped_connect,
)
from dask_devctx.dask_internals.worker import wrapped_handler
from dask_devctx.worker.ipc.unreadable import could_not_be_read

logger = logging.getLogger(__name__)

Message = dict[str, Any]

# Between the address of the worker that asks and what it says, in a field that dask only logs:
# each request says for itself whether its answer can be read.
SAYS: Final = "#"


class Way(Protocol):
    """The way of values from worker to worker, as the connections use it."""

    async def settle(self, address: str) -> str | None:
        """Return the token for a worker that is asked for data, or None.

        The token tells that worker that this one can read its memory.
        """

    async def complete(self, address: str, msg: Message) -> None:
        """Complete a worker's answer before dask sees it."""

    async def prepare(
        self, who: str | None, token: str, msg: Message
    ) -> tuple[Message, Callable[[bool], None]] | None:
        """Return other values to send, and a function to call with whether they were read."""

    def lost(self, address: str) -> None:
        """Note that the connection to a worker ended."""


class Connections:
    """While it is open, two functions see the values that a worker receives and sends.

    Parameters
    ----------
    worker
        The worker.
    way
        The way that the values take.
    has_failed
        Returns whether a device of the worker has failed, so that the worker ends.
    takes_host_forms
        Returns whether values may arrive in host memory, although they belong on devices.

    Attributes
    ----------
    under_way
        The number of requests without an answer. They are completed after it is closed, too.

    Notes
    -----
    dask returns a connection to its pool also if an answer on it could not be read. But the other
    side still waits for the confirmation: it takes the next request for this confirmation, and both
    sides wait without end. Here, such a connection is closed.
    """

    def __init__(
        self,
        worker: Worker,
        way: Way,
        *,
        has_failed: Callable[[], bool] = lambda: False,
        takes_host_forms: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker = worker
        self._has_failed = has_failed
        self._way = way
        self._takes_host_forms = takes_host_forms
        self._open = True
        self.under_way = 0
        with ExitStack() as steps:
            steps.enter_context(tasks_fail_with_unread_inputs(worker))
            steps.enter_context(wrapped_connect(worker, self._around_connect))
            steps.enter_context(wrapped_handler(worker, "get_data", self._around_get_data))
            self._steps = steps.pop_all()

    def close(self) -> None:
        """Leave the worker's connections as they were."""
        self._open = False
        self._steps.close()

    # -- as the receiver

    def _around_connect(self, connect: Connect) -> Connect:
        async def connected(addr: str, timeout: float | None = None) -> Any:
            comm = await connect(addr, timeout)
            asking = getattr(comm.read, "__self__", None)
            if isinstance(asking, _Asking):
                asking.connections = self  # an earlier plugin may have made it
            else:
                asking = _Asking(self, comm, addr)
                comm.read, comm.write = asking.read, asking.write
            return comm

        return connected

    async def _one_by_one(self, address: str, keys: list[Hashable], who: str | None) -> Message:
        """Ask for each value separately, to find the values that cannot be read."""
        data: dict[Hashable, Any] = {}
        for key in keys:
            data.update(await data_of(self._worker, address, [key], who))
        return {"status": "OK", "data": data}

    # -- as the sender

    def _around_get_data(self, get_data: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(
            comm: Any, keys: Any, who: str | None = None, serializers: Any = None
        ) -> Any:
            address, _, token = (who if isinstance(who, str) else "").partition(SAYS)
            who = address or None
            answering = _Answering(comm, partial(self._way.prepare, who, token))
            try:
                return await get_data(answering, keys=keys, who=who, serializers=serializers)
            except Exception as error:
                clear_frames(error)  # dask's log keeps the error: not the values with it
                raise
            finally:
                answering.end()

        return answer


class _Asking:
    """A connection on which this worker asks another."""

    def __init__(self, connections: Connections, comm: Any, address: str) -> None:
        self.connections = connections
        self._address = address
        self._comm = comm
        self._read, self._write = comm.read, comm.write
        self._request: Message | None = None
        self._answered = False  # by us, over other connections

    async def write(self, msg: Any, *args: Any, **kwargs: Any) -> Any:
        if self._answered and msg == "OK":
            return 0
        self._request = None
        of = self.connections
        if not of._open or not isinstance(msg, dict) or msg.get("op") != "get_data":
            return await self._write(msg, *args, **kwargs)
        request, said = msg, await of._way.settle(self._address)
        if (said is not None or of._takes_host_forms()) and msg.get("who"):
            msg = {**msg, "who": f"{msg['who']}{SAYS}{said or ''}"}
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
            self.connections.under_way -= 1

    async def _answer(self, request: Message, *args: Any, **kwargs: Any) -> Any:
        of, address = self.connections, self._address
        try:
            msg = await self._read(*args, **kwargs)
            if isinstance(msg, dict) and msg.get("status") == "OK":
                await of._way.complete(address, msg)
            return msg
        except Exception as error:
            failure = error
            # If a pickle is too short, dask takes its end for the end of the connection.
            if self._comm.closed() and isinstance(error.__context__, EOFError):
                failure = error.__context__
            elif isinstance(error, CommClosedError) or self._comm.closed():
                self._comm.abort()
                of._way.lost(address)
                raise
            self._comm.abort()
        except BaseException:
            self._comm.abort()  # the rest of the answer is not read
            raise
        logger.warning("an answer from %s could not be read", address, exc_info=failure)
        keys = list(request["keys"])
        if UNREAD.get() is None:  # no task asked
            raise failure
        self._answered = True
        if len(keys) > 1:
            return await of._one_by_one(address, keys, request.get("who"))
        could_not_be_read(keys[0], failure, address, device_failed=of._has_failed())
        return {"status": "OK", "data": {}}


class _Answering:
    """The connection of a worker that asked for data, while it is answered."""

    def __init__(self, comm: Any, prepare: Callable[[Message], Awaitable[Any]]) -> None:
        self._comm = comm
        self._prepare = prepare
        self._ended: Callable[[bool], None] | None = None
        self._was_read = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def write(self, msg: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(msg, dict) and "data" in msg:
            try:
                prepared = await self._prepare(msg)
            except CommClosedError:
                self._comm.abort()
                raise
            if prepared is not None:
                msg, self._ended = prepared
        return await self._comm.write(msg, *args, **kwargs)

    async def read(self, *args: Any, **kwargs: Any) -> Any:
        answer = await self._comm.read(*args, **kwargs)
        self._was_read = answer == "OK"
        return answer

    def end(self) -> None:
        if self._ended is not None:
            self._ended(self._was_read)
