"""The messages by which workers of a machine agree on CUDA IPC: malformed ones are refused."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from dask_devctx.transfer.ipc.headers import MalformedHeaderError, count, text

logger = logging.getLogger(__name__)

HELLO: Final = "devctx_ipc_hello"
AGREE: Final = "devctx_ipc_agree"
NEXT: Final = "devctx_ipc_next"
CLOSE: Final = "devctx_ipc_close"

# More buffers than a worker has.
_NUMBERS_LIMIT: Final = 10_000

# A reason may quote an error of the driver.
REASON_LIMIT: Final = 4096

Message = Mapping[str, Any]


def handler(op: str, act: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a handler for dask, which refuses a malformed message with a log line.

    Parameters
    ----------
    op
        The message.
    act
        Called with the fields that the message must have. Further fields are ignored, because
        workers may have another version.
    """
    read, refused = _READERS[op]

    async def handle(**message: Any) -> Any:
        try:
            fields = read(message)
        except MalformedHeaderError as error:
            logger.warning("A message %s was refused: %s", op, error)
            return refused
        return await act(**fields)

    return handle


def _hello(message: Message) -> dict[str, Any]:
    return {name: text(message.get(name), name) for name in ("address", "process", "host")}


def _agree(message: Message) -> dict[str, Any]:
    error = message.get("error")
    if error is not None:
        error = text(error, "error", most=REASON_LIMIT)
    named = {name: text(message.get(name), name) for name in ("address", "token")}
    return {**named, "error": error}


def _next(message: Message) -> dict[str, Any]:
    index = count(message.get("index"), "index")
    return {
        "token": text(message.get("token"), "token"),
        "number": count(message.get("number"), "number"),
        "index": index,
        "read": count(message.get("read"), "read", most=index + 1),
    }


def _close(message: Message) -> dict[str, Any]:
    numbers = message.get("numbers")
    if not isinstance(numbers, list | tuple) or len(numbers) > _NUMBERS_LIMIT:
        raise MalformedHeaderError("'numbers' is no list of numbers")
    read = [count(number, "numbers") for number in numbers]
    return {"token": text(message.get("token"), "token"), "numbers": read}


# The reader of each message, and the answer to a malformed one.
_READERS: Final[Mapping[str, tuple[Callable[[Message], dict[str, Any]], Any]]] = {
    HELLO: (_hello, {"error": "it refused a malformed message"}),
    AGREE: (_agree, None),
    NEXT: (_next, None),
    CLOSE: (_close, False),
}
