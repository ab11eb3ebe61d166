"""The devices that a task asks for, by its annotations or by its function.

``device`` names one device. ``devices`` asks for several at once, ``device_share`` for a part of
each, and ``device_memory`` reserves bytes on each. A task with one of these three has a
:class:`~dask_devctx.annotations.request.Request`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal

from dask_devctx.annotations import answers
from dask_devctx.annotations.names import DEVICE, DEVICES, MEMORY, NAMES, SHARE
from dask_devctx.annotations.request import (
    Request,
    carried_by,
    read,
)
from dask_devctx.cuda.naming import ACCEPTED, AUTO, CURRENT, NO_DEVICE

Unannotated = Literal["assign", "leave"]

__all__ = [
    "DEVICE",
    "DEVICES",
    "MEMORY",
    "NAMES",
    "SHARE",
    "Request",
    "Unannotated",
    "carried_device",
    "not_an_annotation",
    "requested_device",
]

_BEYOND_ONE: Final = NAMES - {DEVICE}


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
    """Return what a task asks for.

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
        The task itself. Its function may carry devices; an annotation takes precedence.

    Returns
    -------
    object
        ``"auto"`` for any device, None for no device, the argument for
        :class:`~dask_devctx.Device`, or a :class:`~dask_devctx.annotations.request.Request`. The
        names of devices are not checked here.

    Raises
    ------
    TypeError, ValueError
        An annotation has no meaning, is out of range, or contradicts another one.
    Exception
        A function in an annotation raised, here or on the scheduler.
    """
    if annotations and not _BEYOND_ONE.isdisjoint(annotations):
        return read(annotations, key, carried_device(task))
    if annotations and DEVICE in annotations:
        wanted = annotations[DEVICE]
        if answers.is_function(wanted):
            wanted = answers.answer_of(DEVICE, wanted, key)
        if (carried := carried_device(task)) is not None:
            wanted = _agreed(wanted, carried)
    else:
        wanted = carried_device(task)
        if wanted is None:
            return AUTO if unannotated == "assign" else None
        if wanted.__class__ in (list, tuple):
            return carried_by(wanted)
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


def _agreed(wanted: object, carried: Any) -> object:
    """Return what an annotation ``device`` and the device of the task's function mean together."""
    if isinstance(wanted, str) and (wanted == AUTO or wanted in CURRENT):
        return carried_by(carried) if isinstance(carried, list | tuple) else carried
    return wanted


def not_an_annotation(wanted: object) -> TypeError:
    """Return the error for an annotation ``device`` that names no device."""
    remedy = ""
    if isinstance(wanted, list | tuple):  # a list reaches the worker as a tuple
        remedy = f". For several devices at once, write dask.annotate(devices={list(wanted)!r})"
    return TypeError(
        f'the annotation \'device\' is {ACCEPTED}; "auto" for any device, None or "none" for '
        "none; or a function that is given the task's key and returns one of these; got "
        f"{wanted!r} of type {type(wanted).__name__}{remedy}"
    )
