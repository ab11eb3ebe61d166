"""Constructors that take the options as keyword arguments; the error for a name unknown to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

from dask_devctx.config.checks import key_of
from dask_devctx.config.options import OPTION_NAMES, RMM_NAMES, SETTINGS, Options
from dask_devctx.errors.base import nearest

# The paragraphs of all options replace this line in a class's docstring.
_PLACE: Final = "{options}"

Init = TypeVar("Init", bound=Callable[..., None])


def takes_options(init: Init) -> Init:
    """Decorate a constructor that takes the options as keyword arguments, for help and editors."""
    signature = inspect.signature(init)
    *own, rest = signature.parameters.values()
    taken = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=str(one.type).removesuffix(" | None") + " | None",
        )
        for one in fields(Options)
        if one.name in OPTION_NAMES
    ]
    others = [rest] if rest.name == "kwargs" else []  # `**options` takes nothing else
    init.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *taken, *others]
    )
    return init


Class = TypeVar("Class", bound=type)


def documents_options(cls: Class) -> Class:
    """Decorate a class whose docstring lists the options, each with its own paragraph."""
    if cls.__doc__ and Options.__doc__:  # python -OO leaves none
        text = inspect.cleandoc(Options.__doc__).split("----------\n", 1)[1].split("\n\nRaises")[0]
        cls.__doc__ = cls.__doc__.replace(_PLACE, text.replace("\n", "\n    "))
    return cls


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], owner: str) -> None:
    """Refuse unknown keyword arguments of a class; the error has the remedy."""
    for name, value in given.items():
        if name in known:
            continue
        if name in SETTINGS:
            key = f"devctx.{key_of(name)}"
            remedy = f"It is configuration: dask.config.set({{{key!r}: {value!r}}})"
        elif name in RMM_NAMES or name == "pool":
            said = {name.removeprefix("rmm_"): value} if name in RMM_NAMES else value
            remedy = f"Write allocator={said!r}, which is devctx.allocator in the configuration"
        else:
            near = nearest(name, known)
            remedy = f"Did you mean {near}?" if near else f"help({owner}) lists all options"
        raise TypeError(f"{owner} has no option {name!r}. {remedy}")
