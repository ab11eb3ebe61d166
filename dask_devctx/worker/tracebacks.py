"""The errors of failed tasks: their tracebacks begin with the task's code."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from distributed import Reschedule

from dask_devctx.errors import DevctxError

# The modules that call a task.
_ON_THE_WAY: Final = ("dask_devctx.", "dask._task_spec")


class BeginsWithTheTask:
    """While it is open, an exception that leaves it loses the frames that lead to the task's code.

    Return or await a task's result inside it: an interpreter raises the exception again without
    adding the frame of the function that uses this.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.__traceback__ = of_the_task(error)


begins_with_the_task: Final = BeginsWithTheTask()


def of_the_task(error: BaseException) -> TracebackType | None:
    """Return the part of an error's traceback that begins with the task's own code.

    An error of this package that no code of the task is part of has no such part: its message says
    all that a user needs. Any other exception keeps its whole traceback then.
    """
    step = of_the_user(error)
    if step is None and not isinstance(error, (DevctxError, Reschedule)):
        return error.__traceback__
    return step


def of_the_user(error: BaseException) -> TracebackType | None:
    """Return the part of an error's traceback that begins with a user's code; None without any."""
    step = error.__traceback__
    while step and step.tb_frame.f_globals.get("__name__", "").startswith(_ON_THE_WAY):
        step = step.tb_next
    return step
