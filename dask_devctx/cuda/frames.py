"""The frames of an exception, which hold arrays as long as somebody keeps the exception."""

from __future__ import annotations

import inspect
import sys
import traceback
from opcode import opmap
from types import FrameType
from typing import Final

_RESUMABLE: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def clear_frames(error: BaseException) -> None:
    """Let the frames of an exception that have ended forget the arrays that they hold.

    Parameters
    ----------
    error
        The exception. Those that it came from are cleared, too.

    Notes
    -----
    A generator or coroutine that is suspended goes on as it was: it may be the frame of an
    exception that it has published and outlives.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    frames: set[FrameType] = set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        left += [one.__cause__, one.__context__]
        for step, _ in traceback.walk_tb(one.__traceback__):
            frame: FrameType | None = step
            while frame is not None and frame not in frames:  # its callers, also those left out
                frames.add(frame)
                if _is_suspended(frame):
                    break
                try:
                    frame.clear()
                except RuntimeError:  # this one, and those that called it, have not ended
                    break
                frame = frame.f_back


def _is_suspended(frame: FrameType) -> bool:
    """Return whether a frame waits to be continued, where Python's ``clear`` would end it."""
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & _RESUMABLE:
        return False
    return frame.f_lasti >= 0 and code.co_code[frame.f_lasti] == opmap["YIELD_VALUE"]
