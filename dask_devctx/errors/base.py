"""The root of the tree of errors, how an error keeps its fields, and the parts of messages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, dataclass_transform


def counted(n: int, noun: str) -> str:
    """Return a number and its noun, for messages: ``"1 device"``, ``"2 devices"``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(names: Sequence[str], at_most: int, comma: str = ", ") -> str:
    """Return the first of some names, and how many more there are: ``"x, y, and 3 more"``."""
    more = f"{comma}and {len(names) - at_most} more" if len(names) > at_most else ""
    return comma.join(names[:at_most]) + more


def nbytes_text(nbytes: int | None) -> str:
    """Return a number of bytes with a binary unit, such as ``"16.0 GiB"``; "?" for None."""
    if nbytes is None:
        return "?"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@dataclass_transform(eq_default=False)
class DevctxError(Exception):
    """Base class of every error that this package raises.

    Notes
    -----
    The annotations in the body of a subclass are its fields and, in this order, its parameters; a
    value after an annotation is the default. Each field becomes an attribute and an argument of
    ``Exception``, so that the error survives pickling on its way from a worker to a client.
    """

    # Not a dataclass: importing that module takes half as long as importing this package.
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._fields = tuple(dict.fromkeys((*cls._fields, *cls.__annotations__)))

    def __init__(self, *args: Any, **named: Any) -> None:
        cls = type(self)
        if names := cls._fields:
            defaults = {name: getattr(cls, name) for name in names if hasattr(cls, name)}
            given = defaults | dict(zip(names, args, strict=False)) | named
            if len(args) > len(names) or given.keys() != set(names):
                raise TypeError(f"{cls.__name__} takes {', '.join(names)}")
            args = tuple(_plain(given[name]) for name in names)
            vars(self).update(zip(names, args, strict=True))
        super().__init__(*args)

    def __repr__(self) -> str:
        # dask logs the repr of a failed task's error, and a notebook shows it. So the repr is a
        # readable message with the remedy.
        said = ". ".join([str(self), *getattr(self, "__notes__", ())])
        return f"{type(self).__name__}({said!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The error is rebuilt by a call of its class. dask rebuilds exceptions without such a call,
        # which fails for an error that is also a MemoryError.
        # The `result` of a function whose scope could not end (cuda/suspending.py) is not pickled.
        kept = {name: value for name, value in self.__dict__.items() if name != "result"}
        return type(self), self.args, kept


def _plain(value: Any) -> Any:
    """Return a field's value as the receiver of a pickle can have it: its text, if need be."""
    if type(value) in (bool, float, int, str, type(None)):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, list | tuple) else repr(value)


# -- names that are mistyped


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is the most like another one; "" if none is like it."""
    import difflib  # only messages need it

    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), "")


def variable(key: str) -> str:
    """Return the environment variable of a key of the section ``devctx``."""
    return f"DASK_DEVCTX__{key.upper().replace('-', '_')}"


def about_unknown(key: str, known: Collection[str]) -> str | None:
    """Return a sentence about a key that the section ``devctx`` does not have; None if it does."""
    name = key.lower().replace("_", "-")
    if name in known:
        return None
    near = nearest(name, known)
    meant = f"; devctx.{near}?" if near else ""
    return f"there is no devctx.{name} (in the environment {variable(key)}){meant}"


_told: set[str] = set()


def warn_of_variables(known: Collection[str]) -> None:
    """Warn of variables of the environment that set nothing, of each once in a process."""
    prefix = variable("")
    keys = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    for text in filter(None, (about_unknown(key, known) for key in keys)):
        if not is_told(text):
            _told.add(text)
            warnings.warn(text, stacklevel=3)


def is_told(text: str) -> bool:
    """Return whether :func:`warn_of_variables` has warned with this text."""
    return text in _told
