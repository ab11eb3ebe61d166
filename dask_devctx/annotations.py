"""The device that a task asks for, by its ``device`` annotation or by its function."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, Literal, TypeGuard

from distributed.protocol import pickle

from dask_devctx.cuda.naming import ACCEPTED, AUTO, CURRENT, NO_DEVICE

logger = logging.getLogger(__name__)

ANNOTATION: Final = "device"
# Whether a task may run again after a device failed while it ran.
RERUN: Final = "rerun"
# The scheduler marks the tasks that may have broken a device, by annotations, because dask sends
# these to the worker that runs a task. The worker watches a task with the first mark, which has the
# number of this watched run and the number of such runs that a task may have. It fails a task with
# the second mark, which has the fields of the error.
WATCHED: Final = "devctx-watched"
REFUSED: Final = "devctx-refused"

# Annotations that seem to name a device, but mean nothing to this package and dask.
_MISTAKEN: Final = frozenset({"Device", "cuda", "devices", "gpu", "gpus", "num_gpus"})

Unannotated = Literal["assign", "leave"]


def carried_device(task: object) -> object:
    """Return the device that a task's function carries by ``on_device(...)(fn)``, or None.

    A task that dask has fused from several functions carries no device.
    """
    fn = getattr(task, "func", None)
    return fn.which if getattr(type(fn), "carries_device", False) else None  # type: ignore[union-attr]


def requested_device(
    annotations: Mapping[str, Any] | None,
    key: Hashable,
    unannotated: Unannotated,
    task: object = None,
) -> object:
    """Return the device that a task asks for.

    Parameters
    ----------
    annotations
        The task's annotations as they reached the worker.
    key
        The task's key, the argument of a callable annotation.
    unannotated
        The rule for a task that names no device: ``"assign"`` gives it any device, ``"leave"``
        gives it none.
    task
        The task itself. Its function may carry a device; an annotation takes precedence.

    Returns
    -------
    object
        ``"auto"`` for any device, None for no device, or the argument for
        :class:`~dask_devctx.Device`. That argument is not checked here.

    Raises
    ------
    Exception
        The function that names the device raised, here or on the scheduler.
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
    if isinstance(wanted, Exception):  # the function raised it
        raise wanted
    if isinstance(wanted, str):
        if wanted == NO_DEVICE:
            return None
        if wanted in CURRENT:  # a task's current device is the device that it gets
            return AUTO
    return wanted


def answer(annotations: Mapping[str, Any] | None, key: Hashable) -> Mapping[str, Any] | None:
    """Return a task's annotations, with a function that names the device replaced by its answer.

    Parameters
    ----------
    annotations, key
        As for :func:`requested_device`.

    Notes
    -----
    The function is called once, on the scheduler. So the worker that is chosen for the device runs
    the task on this same device. If the function raises, the exception takes the function's place,
    and the worker fails the task with it.
    """
    if not annotations or not _is_function(wanted := annotations.get(ANNOTATION)):
        return annotations
    given = _answer_of(wanted, key)
    return {**annotations, ANNOTATION: given if _can_be_sent(given) else _unsendable(given)}


def _is_function(wanted: object) -> TypeGuard[Callable[[Hashable], object]]:
    return callable(wanted) and not isinstance(wanted, type)


def _answer_of(function: Callable[[Hashable], object], key: Hashable) -> object:
    """Return the device that a function names for a task, or the exception that it raises."""
    try:
        given = function(key)
    except Exception as error:
        error.add_note(
            f"Raised by the function {_shown(function)} in the annotation 'device', which names "
            f"the device of the task {key!r}"
        )
        return error.with_traceback(None)
    return not_an_annotation(given) if _is_function(given) else given


def _shown(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _can_be_sent(value: object) -> bool:
    """Return whether a value can be sent to a worker. Any other would end the connection."""
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
    """Return the names of annotations that seem to name a device, but mean nothing."""
    return () if _MISTAKEN.isdisjoint(annotations) else sorted(_MISTAKEN & annotations.keys())


def about_mistaken(name: str) -> str:
    """Return the warning about such an annotation."""
    return (
        f"the annotation {name!r} means nothing to dask-devctx and dask, and has no effect on the "
        f"device of its tasks. To name a device, write dask.annotate({ANNOTATION}=1)"
    )


@functools.cache
def _warn_of_mistaken(name: str) -> None:
    logger.warning("%s", about_mistaken(name))


def may_rerun(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations may run again after a device failed.

    Raises
    ------
    TypeError
        The annotation is neither True nor False.
    """
    given = True if not annotations else annotations.get(RERUN, True)
    if not isinstance(given, bool):
        raise TypeError(
            f"the annotation {RERUN!r} is True or False: whether the task may run again after a "
            f"device failed while it ran; got {given!r} of type {type(given).__name__}"
        )
    return given


def watched_run(annotations: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the number of a task's watched run, and how many it may have; zeros if unwatched."""
    if not annotations or WATCHED not in annotations:
        return 0, 0
    run, most = annotations[WATCHED]
    return run, most


def refusal(annotations: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """Return the fields of the error with which a worker fails a task; None to run it."""
    given = annotations.get(REFUSED) if annotations else None
    return None if given is None else tuple(given)


def had_all_runs(run: int, most: int) -> str:
    """Return why a task does not run again after this watched run of ``most``; "" if it does."""
    if run < most:
        return ""
    return (
        f"a device failed in each of its {run + 1} runs. distributed.scheduler.allowed-failures is "
        f"{most}"
    )
