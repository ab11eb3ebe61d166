"""Functions as annotations: each is called with a task's key, and answers for this task."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeGuard

from distributed.protocol import pickle

from dask_devctx.annotations.names import DEVICE, NAMES, item_on_each
from dask_devctx.cuda.naming import ACCEPTED


def answer(annotations: Mapping[str, Any] | None, key: Hashable) -> Mapping[str, Any] | None:
    """Return a task's annotations, with each function replaced by its answer."""
    # The scheduler calls this once, so that the worker that it chooses for the device runs the task
    # there. An exception of the function takes its place, and the worker fails the task with it.
    if not annotations:
        return annotations
    asked = [name for name in NAMES & annotations.keys() if _is_function(annotations[name])]
    if not asked:
        return annotations
    given = {name: _answer_of(name, annotations[name], key) for name in asked}
    return {
        **annotations,
        **{n: v if _can_be_sent(v) else _unsendable(n, v) for n, v in given.items()},
    }


def said(annotations: Mapping[str, Any], name: str, key: Hashable) -> Any:
    given = annotations.get(name)
    if _is_function(given):
        given = _answer_of(name, given, key)
    if isinstance(given, Exception):  # the function raised it
        raise given
    return given


def _is_function(wanted: object) -> TypeGuard[Callable[[Hashable], object]]:
    return callable(wanted) and not isinstance(wanted, type)


def _answer_of(name: str, function: Callable[[Hashable], object], key: Hashable) -> object:
    """Return the answer of an annotation's function for a task, or the exception it raises."""
    try:
        given = function(key)
    except Exception as error:
        shown = getattr(function, "__qualname__", type(function).__qualname__)
        error.add_note(
            f"Raised by the function {shown} in the annotation {name!r}, which is asked for the "
            f"device of the task {key!r}"
        )
        return error.with_traceback(None)
    return _no_answer(name, given) if _is_function(given) else given


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


def not_an_annotation(wanted: object) -> TypeError:
    """Return the error for an annotation ``device`` that names no device."""
    remedy = ""
    if isinstance(wanted, list | tuple):  # a list reaches the worker as a tuple
        remedy = (
            f". For several devices at once, write dask.annotate(devices={list(wanted)!r}); for "
            f"an item on each, {item_on_each('function', wanted)}"
        )
    return TypeError(
        f'the annotation \'device\' is {ACCEPTED}; "auto" for any device, None or "none" for '
        "none; or a function that is given the task's key and returns one of these; got "
        f"{wanted!r} of type {type(wanted).__name__}{remedy}"
    )


def _no_answer(name: str, given: object) -> TypeError:
    if name == DEVICE:
        return not_an_annotation(given)
    return TypeError(
        f"the function in the annotation {name!r} must return what the annotation may be, got "
        f"{given!r} of type {type(given).__name__}"
    )
