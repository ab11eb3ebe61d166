"""Functions as annotations: each is called with a task's key, and answers for this task."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeGuard

from distributed.protocol import pickle

from dask_devctx.annotations.names import NAMES


def answer(annotations: Mapping[str, Any] | None, key: Hashable) -> Mapping[str, Any] | None:
    """Return a task's annotations, with each function replaced by its answer.

    Parameters
    ----------
    annotations, key
        As for :func:`~dask_devctx.annotations.requested_device`.

    Notes
    -----
    The function is called once, on the scheduler. So the worker that is chosen for the device runs
    the task on this same device. If the function raises, the exception takes the function's place,
    and the worker fails the task with it.
    """
    if not annotations:
        return annotations
    asked = [name for name in NAMES & annotations.keys() if is_function(annotations[name])]
    if not asked:
        return annotations
    given = {name: answer_of(name, annotations[name], key) for name in asked}
    return {
        **annotations,
        **{n: v if _can_be_sent(v) else _unsendable(n, v) for n, v in given.items()},
    }


def is_function(wanted: object) -> TypeGuard[Callable[[Hashable], object]]:
    """Return whether an annotation is a function of the task's key."""
    return callable(wanted) and not isinstance(wanted, type)


def answer_of(name: str, function: Callable[[Hashable], object], key: Hashable) -> object:
    """Return the answer of an annotation's function for a task, or the exception it raises."""
    try:
        given = function(key)
    except Exception as error:
        error.add_note(
            f"Raised by the function {_shown(function)} in the annotation {name!r}, which is asked "
            f"for the device of the task {key!r}"
        )
        return error.with_traceback(None)
    return _no_answer(name, given) if is_function(given) else given


def _shown(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _no_answer(name: str, given: object) -> TypeError:
    from dask_devctx.annotations import DEVICE, not_an_annotation

    if name == DEVICE:
        return not_an_annotation(given)
    return TypeError(
        f"the function in the annotation {name!r} must return what the annotation may be, got "
        f"{given!r} of type {type(given).__name__}"
    )


def _can_be_sent(value: object) -> bool:
    """Return whether a value can be sent to a worker. Any other would end the connection."""
    if value is None or isinstance(value, (int, str)):
        return True
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def _unsendable(name: str, value: object) -> Exception:
    if not isinstance(value, Exception):
        return _no_answer(name, value)
    error = RuntimeError(f"{type(value).__name__}: {value}")
    for note in getattr(value, "__notes__", ()):
        error.add_note(note)
    return error
