"""How to take a value apart, and how to make a similar value with other parts.

This only reads the source. It uses the functions of the built-in base class, and not those that the
value's own class overrides.
"""

from __future__ import annotations

import copyreg
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, product
from typing import Any

# Py_TPFLAGS_HEAPTYPE: set for types that a class statement makes.
_HEAP_TYPE = 1 << 9


class Parts(list[Any]):
    """The parts of a value; the last ones are the attributes in ``names``."""

    names: Sequence[Any] = ()


def inherited(kind: type, name: str) -> Any:
    """Return a type's attribute of this name, without calling its metaclass."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


class Protocol:
    """How to take values of a type apart; ``base`` is its nearest base in another language."""

    # Whether the type defines its own copying, as for pickle, so that this only reads the parts.
    by_reduce: bool
    # Tells the values of this type that hold others; None where all of them may.
    holds: Callable[[Any], bool] | None = None
    # Methods by which a type defines how it is pickled, and so copied.
    _said: tuple[str, ...] = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")

    def __init__(self, kind: type, base: Any = object) -> None:
        self.kind = kind
        self.base = base
        self._has_dict = kind.__dictoffset__ != 0
        self._slots = [
            member
            for each in kind.__mro__
            if "__slots__" in vars(each)
            for member in vars(each).values()
            if type(member) is types.MemberDescriptorType
        ]
        # Only its own code can make a value of a type that is written in another language.
        self.by_reduce = kind in copyreg.dispatch_table or any(
            [inherited(kind, name) is not inherited(base, name) for name in self._said]
            + [
                not each.__flags__ & _HEAP_TYPE and each not in (base, object)
                for each in kind.__mro__[: kind.__mro__.index(base)]
            ]
        )

    def items(self, value: Any) -> list[Any]:
        """Return the parts of a value that are not attributes."""
        return []

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        """Return about so many of the items, those at both ends included, and their number."""
        return (items := self.items(value)), len(items)

    def first(self, parts: Parts) -> int:
        """Return how many of the parts :meth:`begin` needs; :meth:`fill` gets the others."""
        return 0

    def begin(self, value: Any, parts: list[Any]) -> Any:
        """Return a new value of the type; its other parts may still be missing."""
        return self.base.__new__(self.kind)

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        """Put the remaining items into a value that :meth:`begin` made."""

    def attributes(self, value: Any) -> dict[Any, Any]:
        """Return a value's attributes by name; the name of a slot is its descriptor."""
        found: dict[Any, Any] = {}
        if self._has_dict:
            found.update(object.__getattribute__(value, "__dict__"))
        for slot in self._slots:
            with suppress(AttributeError):  # not set
                found[slot] = slot.__get__(value)
        return found

    def parts(self, value: Any) -> Parts:
        """Return the items of a value, then its attributes."""
        parts = Parts(self.items(value))
        if self._has_dict or self._slots:
            attributes = self.attributes(value)
            parts.names = list(attributes)
            parts += attributes.values()
        return parts

    def some(self, value: Any, at_most: int) -> tuple[list[Any], int]:
        """Return about so many of the parts, and the number of all parts."""
        items, n_items = self.some_items(value, at_most)
        attributes = self.attributes(value).values()
        return [*items, *attributes], n_items + len(attributes)

    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        """Put the other parts and the attributes into a value that :meth:`begin` made."""
        n_items = len(parts) - len(names)
        self.finish(value, made, parts[:n_items])
        for name, part in zip(names, parts[n_items:], strict=True):
            if type(name) is types.MemberDescriptorType:
                name.__set__(made, part)
            else:
                object.__getattribute__(made, "__dict__")[name] = part


# -- objects of Python classes, dataclasses included: their attributes are parts

# By type: a function that turns the name of any device into the name of the current device.
_renamed: dict[type, Callable[[Any], Any]] = {}


def register_name(kind: type, renamed: Callable[[Any], Any]) -> None:
    """Register a function that turns a library's device name into that of the current device."""
    _renamed[kind] = renamed


class ObjectLike(Protocol):
    _said = (*Protocol._said, "__getnewargs__", "__getnewargs_ex__")

    def begin(self, value: Any, parts: list[Any]) -> Any:
        if inherited(self.kind, "__del__") is not None:
            raise TypeError("it has a __del__, and a second one like it would end the same twice")
        return super().begin(value, parts)

    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        # An object with a ``to`` like torch's lives on one device, and may store the device's name.
        if inherited(self.kind, "to") is not None:
            parts = [_renamed.get(type(part), lambda name: name)(part) for part in parts]
        super().fill(value, made, parts, names)


# -- containers


class Container(Protocol):
    """A built-in container: ``put`` adds items to a new one; without it, they make a new one."""

    def __init__(
        self,
        kind: type,
        base: Any,
        put: Callable[[Any, list[Any]], object] | None = None,
        backwards: Callable[[Any], Iterator[Any]] = lambda value: iter(()),
    ) -> None:
        super().__init__(kind, base)
        self._put = put
        self._backwards = backwards

    def items(self, value: Any) -> list[Any]:
        return list(self.base.__iter__(value))

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        n = self.base.__len__(value)
        if n <= at_most:
            return self.items(value), n
        return _ends(self.base.__iter__(value), self._backwards(value), at_most), n

    def first(self, parts: Parts) -> int:
        return 0 if self._put else len(parts) - len(parts.names)

    def begin(self, value: Any, parts: list[Any]) -> Any:
        made = self.base.__new__(self.kind, *(() if self._put else (parts,)))
        if self.base is deque:
            deque.__init__(made, (), deque.maxlen.__get__(value))
        return made

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        if self._put:
            self._put(made, items)


def _ends(forwards: Iterator[Any], backwards: Iterator[Any], at_most: int) -> list[Any]:
    last = list(islice(backwards, at_most // 4))
    return [*islice(forwards, at_most - len(last)), *last[::-1]]


def _backwards(value: tuple[Any, ...]) -> Iterator[Any]:
    return (tuple.__getitem__(value, n) for n in range(tuple.__len__(value) - 1, -1, -1))


class DictLike(Container):
    """Dictionaries, both keys and values: an optimizer's state has tensors as keys."""

    def items(self, value: Any) -> list[Any]:
        pairs = list(self.base.items(value))
        return [key for key, _ in pairs] + [item for _, item in pairs]

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        n = 2 * dict.__len__(value)
        if n <= at_most:
            return self.items(value), n
        pairs = self.base.items(value)
        return list(chain.from_iterable(_ends(iter(pairs), reversed(pairs), at_most // 2))), n

    def first(self, parts: Parts) -> int:
        return 0

    def begin(self, value: Any, parts: list[Any]) -> Any:
        made = self.base.__new__(self.kind)
        if self.base is defaultdict:
            factory: Any = vars(defaultdict)["default_factory"]
            factory.__set__(made, factory.__get__(value))
        return made

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        n = len(items) // 2
        for key, item in zip(items[:n], items[n:], strict=True):
            self.base.__setitem__(made, key, item)


class StructSequence(Container):
    """Named tuples that are made in C, such as ``os.terminal_size`` and torch's results."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind, tuple)
        self.by_reduce = False

    def begin(self, value: Any, parts: list[Any]) -> Any:
        unnamed = value.__reduce__()[1][1:]  # the fields that only have a name
        return self.kind(parts, *unnamed)


class ObjectArrayLike(Protocol):
    """NumPy's arrays of objects; all its other arrays hold no other values."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind, kind)

    @staticmethod
    def holds(value: Any) -> bool:
        return bool(value.dtype.kind == "O" and value.ndim)

    def items(self, value: Any) -> list[Any]:
        return list(value.flat) if self.holds(value) else []

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        if value.size <= at_most or not self.holds(value):
            return self.items(value), value.size
        return [*value.flat[:: -(-value.size // (at_most - 1))], value.flat[-1]], value.size

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return value.copy(order="K")

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        # One by one: NumPy would take several that are arrays for rows.
        for index, item in zip(product(*map(range, made.shape)), items, strict=True):
            made[index] = item
        made.flags.writeable = value.flags.writeable


class Call(Protocol):
    """A function with some of its arguments: a partial, or a method bound to a value."""

    def __init__(self, kind: type, base: Any) -> None:
        super().__init__(kind, base)
        self._has_dict &= base is functools.partial

    def items(self, value: Any) -> list[Any]:
        if self.base is types.MethodType:
            return [value.__self__]
        return [value.func, value.args, value.keywords]

    def first(self, parts: Parts) -> int:
        return len(parts) - len(parts.names)

    def begin(self, value: Any, parts: list[Any]) -> Any:
        if self.base is types.MethodType:
            return types.MethodType(value.__func__, *parts)
        function, args, keywords = parts
        return functools.partial.__new__(self.kind, function, *args, **keywords)


_BASES: dict[type, Callable[..., Protocol]] = {
    defaultdict: DictLike,
    OrderedDict: DictLike,
    dict: DictLike,
    list: partial(Container, put=list.extend, backwards=list.__reversed__),
    tuple: partial(Container, backwards=_backwards),
    set: partial(Container, put=set.update),
    frozenset: Container,
    deque: partial(Container, put=deque.extend, backwards=deque.__reversed__),
    functools.partial: Call,
    types.MethodType: Call,
    types.SimpleNamespace: ObjectLike,
}


def built_in(kind: type, is_foreign: Callable[[type], bool]) -> Protocol | None:
    """Return the protocol for values of a type, or None for a type that holds no arrays."""
    if tuple in kind.__mro__ and inherited(kind, "n_sequence_fields") is not None:
        return StructSequence(kind)
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return ObjectArrayLike(kind)
    for each in kind.__mro__:
        if each in _BASES:
            return _BASES[each](kind, each)
        if each is not object and is_foreign(each):
            return None
    protocol = ObjectLike(kind)
    return protocol if protocol._has_dict or protocol._slots else None
