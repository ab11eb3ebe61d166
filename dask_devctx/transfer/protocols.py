"""How to take a value apart, and how to make a similar value with other parts.

This only reads the source. It uses the functions of the built-in base class, and not those that the
value's own class overrides.
"""

from __future__ import annotations

import copyreg
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

# Py_TPFLAGS_HEAPTYPE: set for types that a class statement makes.
_HEAP_TYPE = 1 << 9


class Parts(list[Any]):
    """The parts of a value; the last ones are the attributes in ``names``."""

    names: Sequence[Any] = ()


class Protocol(ABC):
    """How to take values of a type apart and put them together again.

    Parameters
    ----------
    kind
        The type.
    base
        Its nearest base that is not written in Python.

    Attributes
    ----------
    by_reduce
        Whether the type defines its own copying, as for pickle. Then this protocol only reads the
        parts, and :class:`Reduced` makes a new value.
    """

    base: type = object
    # Tells the values of this type that hold others; None where all of them may.
    holds: Callable[[Any], bool] | None = None
    # Methods by which a type defines how it is pickled, and so copied.
    _said: tuple[str, ...] = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.by_reduce = kind in copyreg.dispatch_table or any(
            inherited(kind, name) is not inherited(self.base, name) for name in self._said
        )
        self._slots = [
            member
            for each in kind.__mro__
            if "__slots__" in vars(each)
            for member in vars(each).values()
            if type(member) is types.MemberDescriptorType
        ]
        self._has_dict = kind.__dictoffset__ != 0
        # Only its own code can make a value of a type that is written in another language.
        self.by_reduce |= any(
            not each.__flags__ & _HEAP_TYPE and each not in (self.base, object)
            for each in kind.__mro__[: kind.__mro__.index(self.base)]
        )

    @abstractmethod
    def items(self, value: Any) -> list[Any]:
        """Return the parts of a value without its attributes."""

    def first(self, parts: Parts) -> int:
        """Return how many of the parts :meth:`begin` needs; :meth:`finish` gets the others."""
        return 0

    @abstractmethod
    def begin(self, value: Any, parts: list[Any]) -> Any:
        """Return a new value of the type; its other parts may still be missing."""

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        """Put the remaining items into a value that :meth:`begin` made."""
        return

    def some(self, value: Any, at_most: int) -> tuple[list[Any], int]:
        """Return about ``at_most`` parts, spread over the value, and the number of all parts."""
        items, n_items = self.some_items(value, at_most)
        attributes, _ = self.attributes(value)
        return [*items, *attributes], n_items + len(attributes)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        """Return at most so many parts that are not attributes, and the number of all of them."""
        items = self.items(value)
        return spread(items, at_most), len(items)

    def attributes(self, value: Any) -> tuple[list[Any], list[Any]]:
        """Return a value's attributes and their names; the name of a slot is its descriptor."""
        if not (self._has_dict or self._slots):
            return [], []
        found: list[Any] = []
        names: list[Any] = []
        if self._has_dict:
            attributes = object.__getattribute__(value, "__dict__")
            names += attributes
            found += attributes.values()
        for slot in self._slots:
            try:
                found.append(slot.__get__(value))
            except AttributeError:  # not set
                continue
            names.append(slot)
        return found, names

    def parts(self, value: Any) -> Parts:
        """Return the items of a value, then its attributes."""
        parts = Parts(self.items(value))
        attributes, parts.names = self.attributes(value)
        parts += attributes
        return parts

    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        """Put the other parts and the attributes into a value that :meth:`begin` made."""
        n_items = len(parts) - len(names)
        self.finish(value, made, parts[:n_items])
        for name, part in zip(names, parts[n_items:], strict=True):
            if type(name) is types.MemberDescriptorType:
                name.__set__(made, part)
            else:
                object.__getattribute__(made, "__dict__")[name] = part


def inherited(kind: type, name: str) -> Any:
    """Return a type's attribute of this name, without calling its metaclass."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def spread(parts: Sequence[Any], at_most: int) -> Sequence[Any]:
    """Return at most so many of the parts: the first, the last, and others at even steps."""
    n = len(parts)
    if n <= at_most:
        return parts
    return [parts[index * (n - 1) // (at_most - 1)] for index in range(at_most)]


class Reduced(Protocol):
    """Copies a value like a pickle does: by its ``__reduce_ex__``, or by ``copyreg``."""

    def items(self, value: Any) -> list[Any]:
        reduce = copyreg.dispatch_table.get(self.kind)
        said = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if not isinstance(said, tuple):
            raise TypeError(f"its __reduce_ex__ names one global object, {said!r}")
        function, args = said[:2]
        state, items, pairs, set_state = (said[2:] + (None,) * 4)[:4]
        return [function, args, state, list(items or ()), list(pairs or ()), set_state]

    def parts(self, value: Any) -> Parts:
        return Parts(self.items(value))

    def first(self, parts: Parts) -> int:
        return 2

    def begin(self, value: Any, parts: list[Any]) -> Any:
        function, args = parts
        made = function(*args)
        if made is value:
            raise TypeError("its __reduce_ex__ gives the same object again")
        return made

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        state, members, pairs, set_state = items
        if state is not None:
            if type(state) is dict:
                state = dict(state)  # it may be the source's own dictionary: do not share it
            if set_state is not None:
                set_state(made, state)
            elif hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                slots = None
                if isinstance(state, tuple) and len(state) == 2:
                    state, slots = state
                made.__dict__.update(state or {})
                for name, part in (slots or {}).items():
                    object.__setattr__(made, name, part)
        for member in members:
            made.append(member)
        for key, part in pairs:
            made[key] = part
