"""Values from another worker: each answer is completed, from its staging memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from copy import copy
from itertools import islice
from typing import Any

from distributed.comm import CommClosedError
from distributed.core import clean_exception

from dask_devctx.cuda.out_of_memory import clear_frames, is_out_of_memory
from dask_devctx.dask_internals.connections import UNREAD, data_of
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer.ipc.receiving import Receiving
from dask_devctx.transfer.parcel import unpack
from dask_devctx.transfer.pieces import more_pieces
from dask_devctx.worker.peers.transfers import NEXT, QUICK_NBYTES, STAGED, PeerTransfers
from dask_devctx.worker.peers.transport import FULL, SAYS
from dask_devctx.worker.values.store import Store
from dask_devctx.worker.values.value import Value

logger = logging.getLogger(__name__)


class ReadThroughHostError(CommClosedError):  # type: ignore[misc]
    """Values cannot be read from staging memory, and are to be asked for again."""


async def ask(
    local: PeerTransfers,
    rpc: Any,
    keys: Collection[Hashable],
    worker: str,
    *,
    who: str | None = None,
    serializers: Any = None,
    deserializers: Any = None,
) -> dict[str, Any]:
    """Return another worker's answer to a request for values, with all that it staged.

    If the answer cannot be completed, its connection is closed.
    """
    # dask returns a connection to its pool also if an answer on it could not be read. But the other
    # side still waits for the confirmation: it takes the next request for this confirmation, and
    # both sides wait without end.
    request = {"op": "get_data", "keys": keys, "who": who, "reply": True}
    if who and local.devices:  # values may arrive in host memory: the store restores them
        request["who"] = f"{who}{SAYS}{local.transport.says(worker)}"
    if deserializers := deserializers or rpc.deserializers:
        request["serializers"] = deserializers
    local.under_way += 1
    try:
        comm = await rpc.connect(worker)
        try:
            await comm.write(request, serializers=serializers or rpc.serializers, on_error="raise")
            msg: dict[str, Any] = await comm.read(deserializers=deserializers)
            if msg["status"] == "OK":
                await _complete(local, worker, comm, msg)
                if not isinstance(local.worker.data, Store):  # the plugin was removed meanwhile
                    for key, value in msg["data"].items():
                        msg["data"][key] = copy(value) if type(value) is Value else value
                with suppress(CommClosedError):  # a sender that is gone does not wait for this
                    await comm.write("OK")
            elif msg["status"] == "uncaught-error":
                raise _could_not_be_sent(worker, msg)
            return msg
        except BaseException as error:
            # If a pickle is too short, dask takes its end for the end of the connection.
            too_short = comm.closed() and isinstance(error.__context__, EOFError)
            again = isinstance(error, ReadThroughHostError) and not comm.closed()
            is_lost = isinstance(error, CommClosedError) or comm.closed()
            comm.abort()  # the rest of the answer is not read
            if not isinstance(error, Exception) or (is_lost and not (too_short or again)):
                raise
            failure: Any = error.__context__ if too_short else error
        finally:
            rpc.reuse(worker, comm)
        if not again:
            logger.warning("an answer from %s could not be read", worker, exc_info=failure)
            if UNREAD.get() is None:  # no task asked
                raise failure
        clear_frames(failure)
        if again:
            how = {"serializers": serializers, "deserializers": deserializers}
            return await ask(local, rpc, keys, worker, who=who, **how)
        data: dict[Hashable, Any] = {}
        if len(keys) == 1:
            _could_not_be_read(next(iter(keys)), failure, worker, failed=local.has_failed())
        else:  # where some cannot be read, each by itself, to find those
            for key in keys:
                data.update(await data_of(local.worker, worker, [key], who))
        return {"status": "OK", "data": data}
    except Exception as error:
        clear_frames(error)  # dask's log keeps the error: not what had arrived of the values
        raise
    finally:
        local.under_way -= 1


def _could_not_be_sent(address: str, msg: dict[str, Any]) -> Any:
    """Return the error of a worker that was asked; what a device there raised passes."""
    _, error, _ = clean_exception(**msg)
    if isinstance(error, DriverError) and not is_out_of_memory(error):
        return CommClosedError(f"{address} could not send values: {error}")
    return error or CommClosedError(f"{address} could not send values")


async def _complete(local: PeerTransfers, address: str, comm: Any, msg: dict[str, Any]) -> None:
    """Put the values of an answer together; on `CommClosedError`, dask asks again, or another."""
    if STAGED not in msg:
        return
    begun, data = time.perf_counter(), msg["data"]
    header, arriving = msg.pop(STAGED)
    devices = {device.uuid: device for device in local.devices}
    device = devices.get(header.source, local.devices[0])
    receiving = Receiving(address, header, device, local.opened)
    unread: dict[Hashable, Exception] = {}

    def unpacked() -> None:
        parts = iter(receiving.parts)
        with device:
            for key, (count, pickled, buffers) in arriving.items():
                try:
                    data[key] = unpack(pickled, buffers, [*islice(parts, count)])
                except Exception as error:
                    unread[key] = error

    spill = local.store.spill
    try:
        if not spill.make_room(device, receiving.nbytes, wait=False):
            await local.run(spill.make_room, device, 0)
        await _arrive(local, comm, receiving, unpacked)
    except Exception as error:
        no_memory = is_out_of_memory(error)  # host memory has room, until a task needs the values
        if not (no_memory or isinstance(error, DevctxError | OSError)):
            unread = dict.fromkeys(arriving, error)
            if more_pieces(receiving.nbytes):  # their messages are not read
                comm.abort()
        elif local.has_failed(device) or isinstance(error, OSError):
            text = f"values from {address} could not be read: {error}"
            raise CommClosedError(text) from error
        else:
            reason = FULL if no_memory else "its memory cannot be read"
            local.transport.refuse(address, f"{reason}: {error}")
            await local.close_memory_of(address)
            raise ReadThroughHostError from error
    finally:
        spill.give_room(device, receiving.nbytes)
    for key, why in unread.items():
        _could_not_be_read(key, why, address, failed=local.has_failed())
    if len(unread) < len(arriving):
        took, ends = time.perf_counter() - begun, (header.source, device.uuid)
        local.traffic.arrived(*ends, receiving.nbytes, took, len(arriving))


async def _arrive(
    local: PeerTransfers, comm: Any, receiving: Receiving, unpacked: Callable[[], None]
) -> None:
    more = more_pieces(receiving.nbytes)

    def begin() -> None:  # each change of threads takes time
        local.store.spill.allocated(receiving.device, receiving.nbytes, receiving.allocate)
        if receiving.nbytes:
            receiving.start()
        if not more:
            end()

    def end() -> None:
        if receiving.nbytes:
            receiving.finish()
        unpacked()

    quick = receiving.nbytes <= QUICK_NBYTES and receiving.is_quick()
    if quick:
        try:
            receiving.allocate()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            quick = False  # other values may have to leave
    if not quick:
        await local.run(begin)
        try:
            for at in more:
                if (said := await comm.read()) != NEXT:
                    raise CommClosedError(f"the rest of a value was not staged: {said}")
                await local.run(receiving.copy_piece, at)
        except BaseException:
            await local.run(receiving.finish)  # its memory is freed next
            raise
        if more:
            await local.run(end)
        return
    if receiving.nbytes:
        receiving.start()
        await local.copied(receiving)
    unpacked()


def _could_not_be_read(key: Hashable, error: Exception, sender: str, *, failed: bool) -> None:
    """Note for its tasks that a value could not be read; if a device ``failed``, others can."""
    error = error.with_traceback(None)
    if failed:
        raise CommClosedError(f"{key!r} from {sender} could not be read: {error}") from error
    error.add_note(f"{key!r} could not be read when it arrived from {sender}")
    unread = UNREAD.get()
    if unread is None:  # no task asked
        raise error
    unread[key] = error
