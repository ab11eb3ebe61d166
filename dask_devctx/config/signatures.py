"""Constructors that take the options as keyword arguments; the error for a name unknown to them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from dask_devctx.config.checks import key_of
from dask_devctx.config.options import OPTION_NAMES, RMM_NAMES, SETTINGS, Options
from dask_devctx.errors.base import nearest

# The paragraphs of all options replace this line in a class's docstring.
_PLACE: Final = "{options}"

P = ParamSpec("P")
Init = TypeVar("Init", bound=Callable[..., None])


def takes_only(
    options: Callable[P, Options],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorate a constructor whose keyword arguments are the options, for help and editors."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        _sign(init, others=False)
        return init

    return decorate


def takes_also(init: Init) -> Init:
    """Decorate a constructor that takes the options and other keyword arguments."""
    _sign(init, others=True)
    return init


def _sign(init: Any, *, others: bool) -> None:
    signature = inspect.signature(init)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
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
    parameters = itertools.chain(own, taken, rest if others else ())
    init.__signature__ = signature.replace(parameters=list(parameters))


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
