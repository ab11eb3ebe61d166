"""The ``device`` annotation: what a task asks for, as the worker reads it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal

from dask_devctx.device import Device
from dask_devctx.selection import ACCEPTED, AUTO, NO_DEVICE

ANNOTATION: Final = "device"

Unannotated = Literal["assign", "leave"]


def requested_device(
    annotations: Mapping[str, Any] | None, key: Hashable, unannotated: Unannotated
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

    Returns
    -------
    object
        ``"auto"`` for any device, None for none, else what :class:`~dask_devctx.Device` is to make
        a device of; that is not tried here.
    """
    if not annotations or ANNOTATION not in annotations:
        return AUTO if unannotated == "assign" else None
    wanted = annotations[ANNOTATION]
    if wanted.__class__ is int:
        return wanted
    if callable(wanted) and not isinstance(wanted, (type, Device)):
        wanted = wanted(key)
    return None if isinstance(wanted, str) and wanted == NO_DEVICE else wanted


def not_an_annotation(wanted: object) -> TypeError:
    """Return the error for an annotation that names no device."""
    return TypeError(
        f'the annotation \'device\' is {ACCEPTED}; "auto" for any device, None or "none" for '
        "none; or a function that is given the task's key and returns one of these; got "
        f"{wanted!r} of type {type(wanted).__name__}"
    )
