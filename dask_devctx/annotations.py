"""What a task asks for: its ``device`` annotation, or the device that its function carries."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal

from dask_devctx.cuda.naming import ACCEPTED, AUTO, CURRENT, NO_DEVICE

ANNOTATION: Final = "device"
# On a task that may have broken a device: who runs it watches it. An annotation, because dask sends
# those to whichever worker runs the task.
WATCHED: Final = "devctx-watched"

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
    """
    if annotations and ANNOTATION in annotations:
        wanted = annotations[ANNOTATION]
    else:
        wanted = carried_device(task)
        if wanted is None:
            return AUTO if unannotated == "assign" else None
    if wanted.__class__ is int:
        return wanted
    if callable(wanted) and not isinstance(wanted, type):
        wanted = wanted(key)
    if isinstance(wanted, str):
        if wanted == NO_DEVICE:
            return None
        if wanted in CURRENT:  # of a task, that is the one that it is given
            return AUTO
    return wanted


def not_an_annotation(wanted: object) -> TypeError:
    """Return the error for an annotation that names no device."""
    return TypeError(
        f'the annotation \'device\' is {ACCEPTED}; "auto" for any device, None or "none" for '
        "none; or a function that is given the task's key and returns one of these; got "
        f"{wanted!r} of type {type(wanted).__name__}"
    )


def is_watched(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations is to be watched."""
    return bool(annotations) and WATCHED in annotations  # type: ignore[operator]
