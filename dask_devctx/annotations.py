"""What a task asks for: its ``device`` annotation, or the device that its function carries."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, Literal, TypeGuard

from distributed.protocol import pickle

from dask_devctx.cuda.naming import ACCEPTED, AUTO, CURRENT, NO_DEVICE

logger = logging.getLogger(__name__)

ANNOTATION: Final = "device"
# On a task that may have broken a device: who runs it watches it. An annotation, because dask sends
# those to whichever worker runs the task.
WATCHED: Final = "devctx-watched"

# Annotations that mean nothing to this package nor to dask, and seem to.
_MISTAKEN: Final = frozenset({"Device", "cuda", "devices", "gpu", "gpus", "num_gpus"})

Unannotated = Literal["assign", "leave"]


def carried_device(task: object) -> object:
    """Return the device that a task's own function names, ``on_device(...)(fn)``; None for none.

    Where dask has fused the function with others, the task is all of them and names none.
    """
    fn = getattr(task, "func", None)
    return fn.which if getattr(type(fn), "carries_device", False) else None  # type: ignore[union-attr]


def requested_device(
    annotations: Mapping[str, Any] | None,
    key: Hashable,
    unannotated: Unannotated,
    task: object = None,
) -> object:
    """Return what a task asks for.

    Parameters
    ----------
    annotations
        The task's annotations as they reached the worker.
    key
        The task's key, which a callable annotation is given.
    unannotated
        What a task that says nothing gets: ``"assign"`` or ``"leave"``.
    task
        What is to be executed, which may carry a device; the annotation wins.

    Returns
    -------
    object
        ``"auto"`` for any device, None for none, else what :class:`~dask_devctx.Device` is to make
        a device of; that is not tried here.

    Raises
    ------
    Exception
        A function that is to name the device has raised, here or where it was called.
    """
    if annotations and ANNOTATION in annotations:
        wanted = annotations[ANNOTATION]
        if _is_function(wanted):
            wanted = _answer_of(wanted, key)
    else:
        if annotations:
            for name in mistaken(annotations):
                _warn_of_mistaken(name)
        wanted = carried_device(task)
        if wanted is None:
            return AUTO if unannotated == "assign" else None
    if wanted.__class__ is int:
        return wanted
    if isinstance(wanted, Exception):  # in the place of an answer
        raise wanted
    if isinstance(wanted, str):
        if wanted == NO_DEVICE:
            return None
        if wanted in CURRENT:  # of a task, that is the one that it is given
            return AUTO
    return wanted


def answer(annotations: Mapping[str, Any] | None, key: Hashable) -> Mapping[str, Any] | None:
    """Return a task's annotations with the device in the place of a function that names it.

    Parameters
    ----------
    annotations, key
        As for :func:`requested_device`.

    Notes
    -----
    The function is called once, where the task's worker is chosen, so that the worker runs the task
    on the device for which it was chosen. If it raises, the exception stands in its place: the
    worker fails the task with it.
    """
    if not annotations or not _is_function(wanted := annotations.get(ANNOTATION)):
        return annotations
    given = _answer_of(wanted, key)
    return {**annotations, ANNOTATION: given if _can_be_sent(given) else _unsendable(given)}


def _is_function(wanted: object) -> TypeGuard[Callable[[Hashable], object]]:
    return callable(wanted) and not isinstance(wanted, type)


def _answer_of(function: Callable[[Hashable], object], key: Hashable) -> object:
    """Return what a function names for a task, or the exception that it raises."""
    try:
        given = function(key)
    except Exception as error:
        error.add_note(
            f"Raised by the function {_shown(function)} that the annotation 'device' gives: it is "
            f"to name the device of the task {key!r}"
        )
        return error.with_traceback(None)
    return not_an_annotation(given) if _is_function(given) else given


def _shown(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _can_be_sent(value: object) -> bool:
    """Return whether a value reaches a worker; one that does not would end the connection to it."""
    if value is None or isinstance(value, (int, str)):
        return True
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def _unsendable(value: object) -> Exception:
    if not isinstance(value, Exception):
        return not_an_annotation(value)
    error = RuntimeError(f"{type(value).__name__}: {value}")
    for note in getattr(value, "__notes__", ()):
        error.add_note(note)
    return error


def not_an_annotation(wanted: object) -> TypeError:
    """Return the error for an annotation that names no device."""
    return TypeError(
        f'the annotation \'device\' is {ACCEPTED}; "auto" for any device, None or "none" for '
        "none; or a function that is given the task's key and returns one of these; got "
        f"{wanted!r} of type {type(wanted).__name__}"
    )


def mistaken(annotations: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of annotations that mean nothing and seem to name a device."""
    return () if _MISTAKEN.isdisjoint(annotations) else sorted(_MISTAKEN & annotations.keys())


def about_mistaken(name: str) -> str:
    """Return what to say of such an annotation."""
    return (
        f"the annotation {name!r} means nothing to dask-devctx and dask, and its tasks get a "
        f"device as if it were not there: write dask.annotate({ANNOTATION}=1)"
    )


@functools.cache
def _warn_of_mistaken(name: str) -> None:
    logger.warning("%s", about_mistaken(name))


def is_watched(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations is to be watched."""
    return bool(annotations) and WATCHED in annotations  # type: ignore[operator]
