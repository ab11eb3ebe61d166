"""How each type of value is taken apart, and a like one put together around other parts.

A source is only read: with the functions of its built-in base, past whatever its own class does.
"""

from __future__ import annotations

import copyreg
import functools
import types
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

# Py_TPFLAGS_HEAPTYPE: a class statement's types have it.
_HEAP_TYPE = 1 << 9


class Parts(list[Any]):
    """What is in a value; ``names`` says which attributes the last of them are."""

    names: Sequence[Any] = ()


class Protocol(ABC):
    """How a type of value is taken apart and put together again.

    Parameters
    ----------
    kind
        The type.
    base
        Its nearest base that is not written in Python.

    Attributes
    ----------
    by_reduce
        Whether the type says itself how it is copied, as for pickle; then its parts are only looked
        at, and a value like it is made by :class:`Reduced`.
    """

    base: type = object
    # Names that a type defines to say how it is pickled, and so copied.
    _said: tuple[str, ...] = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.by_reduce = kind in copyreg.dispatch_table or any(
            getattr(kind, name, None) is not getattr(self.base, name, None) for name in self._said
        )
        self._slots = [
            member
            for each in kind.__mro__
            if "__slots__" in vars(each)
            for member in vars(each).values()
            if type(member) is types.MemberDescriptorType
        ]
        self._has_dict = kind.__dictoffset__ != 0
        # One of a library in another language is made by its own code alone.
        self.by_reduce |= any(
            not each.__flags__ & _HEAP_TYPE and each not in (self.base, object)
            for each in kind.__mro__[: kind.__mro__.index(self.base)]
        )

    @abstractmethod
    def items(self, value: Any) -> list[Any]:
        """Return what is inside but for attributes."""

    def first(self, parts: Parts) -> int:
        """Return how many of the parts :meth:`begin` needs; :meth:`finish` is given the others."""
        return 0

    @abstractmethod
    def begin(self, value: Any, parts: list[Any]) -> Any:
        """Return a new value of the type, which may be without its other parts yet."""

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        """Put what is inside into a value that :meth:`begin` made, where that was not needed."""
        return

    def some(self, value: Any, at_most: int) -> tuple[list[Any], int]:
        """Return about so many of the parts, from everywhere, and how many there are."""
        items, n_items = self.some_items(value, at_most)
        attributes, _ = self.attributes(value)
        return [*items, *attributes], n_items + len(attributes)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        """Return so many of what is inside but for attributes, and how much there is."""
        items = self.items(value)
        return spread(items, at_most), len(items)

    def attributes(self, value: Any) -> tuple[list[Any], list[Any]]:
        """Return a value's attributes, and their names: a slot's is its descriptor."""
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
        """Return what is inside, then its attributes."""
        parts = Parts(self.items(value))
        attributes, parts.names = self.attributes(value)
        parts += attributes
        return parts

    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        """Put the other parts into a value that :meth:`begin` made, and give it its attributes."""
        n_items = len(parts) - len(names)
        self.finish(value, made, parts[:n_items])
        for name, part in zip(names, parts[n_items:], strict=True):
            if type(name) is types.MemberDescriptorType:
                name.__set__(made, part)
            else:
                object.__getattribute__(made, "__dict__")[name] = part


def spread(parts: Sequence[Any], at_most: int) -> Sequence[Any]:
    """Return so many of some parts: the first, the last, and those at even steps between."""
    n = len(parts)
    if n <= at_most:
        return parts
    step = -(-n // (at_most - 1))
    return [*parts[::step], parts[-1]]


def _ends(forwards: Iterator[Any], backwards: Iterator[Any], at_most: int) -> list[Any]:
    last = at_most // 4
    return [*islice(forwards, at_most - last), *islice(backwards, last)]


class ListLike(Protocol):
    base = list

    def items(self, value: Any) -> list[Any]:
        return list.copy(value)

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return list.__new__(self.kind)

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        list.extend(made, items)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        n = list.__len__(value)
        if n <= at_most:
            return self.items(value), n
        take = list.__getitem__
        return [*take(value, slice(None, None, -(-n // (at_most - 1)))), take(value, -1)], n


class TupleLike(Protocol):
    """Tuples and named ones, past a ``__new__`` whose arguments nobody knows."""

    base = tuple

    def items(self, value: Any) -> list[Any]:
        return list(tuple.__iter__(value))

    def first(self, parts: Parts) -> int:
        return len(parts) - len(parts.names)

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return tuple.__new__(self.kind, parts)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        n = tuple.__len__(value)
        if n <= at_most:
            return self.items(value), n
        take = tuple.__getitem__
        return [*take(value, slice(None, None, -(-n // (at_most - 1)))), take(value, -1)], n


class StructSequence(TupleLike):
    """Named tuples that are made in C, such as ``os.terminal_size`` and what torch returns."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self.by_reduce = False

    def begin(self, value: Any, parts: list[Any]) -> Any:
        unnamed = value.__reduce__()[1][1:]  # the fields that only have a name
        return self.kind(parts, *unnamed)


class SetLike(Protocol):
    base = set

    def items(self, value: Any) -> list[Any]:
        return list(set.__iter__(value))

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return set.__new__(self.kind)

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        set.update(made, items)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        return list(islice(set.__iter__(value), at_most)), set.__len__(value)


class FrozenSetLike(Protocol):
    base = frozenset

    def items(self, value: Any) -> list[Any]:
        return list(frozenset.__iter__(value))

    def first(self, parts: Parts) -> int:
        return len(parts) - len(parts.names)

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return frozenset.__new__(self.kind, parts)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        return list(islice(frozenset.__iter__(value), at_most)), frozenset.__len__(value)


class QueueLike(Protocol):
    base = deque

    def items(self, value: Any) -> list[Any]:
        return list(deque.__iter__(value))

    def begin(self, value: Any, parts: list[Any]) -> Any:
        made: deque[Any] = deque.__new__(self.kind)
        deque.__init__(made, (), deque.maxlen.__get__(value))
        return made

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        deque.extend(made, items)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        n = deque.__len__(value)
        if n <= at_most:
            return self.items(value), n
        return _ends(deque.__iter__(value), deque.__reversed__(value), at_most), n


class DictLike(Protocol):
    """Dictionaries, keys and values: an optimizer's state has tensors for keys."""

    base: type[dict[Any, Any]] = dict

    def items(self, value: Any) -> list[Any]:
        keys_and_values = self.base.items(value)
        return [key for key, _ in keys_and_values] + [item for _, item in keys_and_values]

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return self.base.__new__(self.kind)

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        n = len(items) // 2
        for key, item in zip(items[:n], items[n:], strict=True):
            self.base.__setitem__(made, key, item)

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        n = 2 * dict.__len__(value)
        if n <= at_most:
            return self.items(value), n
        pairs = self.base.items(value)
        return list(chain.from_iterable(_ends(iter(pairs), reversed(pairs), at_most // 2))), n


class OrderedDictLike(DictLike):
    base = OrderedDict


class DefaultDictLike(DictLike):
    base = defaultdict

    def begin(self, value: Any, parts: list[Any]) -> Any:
        made: defaultdict[Any, Any] = defaultdict.__new__(self.kind)
        factory: Any = vars(defaultdict)["default_factory"]
        factory.__set__(made, factory.__get__(value))
        return made


class PartialLike(Protocol):
    base = functools.partial

    def items(self, value: Any) -> list[Any]:
        return [value.func, value.args, value.keywords]

    def first(self, parts: Parts) -> int:
        return 3

    def begin(self, value: Any, parts: list[Any]) -> Any:
        function, args, keywords = parts
        return functools.partial.__new__(self.kind, function, *args, **keywords)


class MethodLike(Protocol):
    """A method bound to a value."""

    base = types.MethodType

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self._has_dict = False

    def items(self, value: Any) -> list[Any]:
        return [value.__self__]

    def first(self, parts: Parts) -> int:
        return 1

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return types.MethodType(value.__func__, parts[0])


class ObjectLike(Protocol):
    """Objects of classes written in Python: their attributes, dataclasses' as all others'."""

    _said = (*Protocol._said, "__getnewargs__", "__getnewargs_ex__")

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        # Two that end what one has begun would end it twice.
        self._ends_something = hasattr(kind, "__del__")

    @property
    def holds_nothing(self) -> bool:
        """Whether such a value has no attributes."""
        return not (self._has_dict or self._slots)

    def some(self, value: Any, at_most: int) -> tuple[list[Any], int]:
        attributes = self.attributes(value)[0]
        return attributes, len(attributes)

    def items(self, value: Any) -> list[Any]:
        return []

    def begin(self, value: Any, parts: list[Any]) -> Any:
        if self._ends_something:
            raise TypeError("it has a __del__, and a second one like it would end the same twice")
        new: Any = self.base.__new__
        return new(self.kind)


class NamespaceLike(ObjectLike):
    base = types.SimpleNamespace


class Reduced(Protocol):
    """A value as its own ``__reduce_ex__`` says, or what ``copyreg`` knows: as it is pickled."""

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
                state = dict(state)  # it may be the source's own, and be kept
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


_BASES: dict[type, Callable[[type], Protocol]] = {
    defaultdict: DefaultDictLike,
    OrderedDict: OrderedDictLike,
    dict: DictLike,
    list: ListLike,
    tuple: TupleLike,
    set: SetLike,
    frozenset: FrozenSetLike,
    deque: QueueLike,
    functools.partial: PartialLike,
    types.MethodType: MethodLike,
    types.SimpleNamespace: NamespaceLike,
}


def built_in(kind: type, is_foreign: Callable[[type], bool]) -> Protocol | None:
    """Return how values of a type are taken apart, or None for those that hold no arrays.

    Parameters
    ----------
    kind
        The type.
    is_foreign
        Whether a class belongs to a library whose objects hold no arrays on devices.
    """
    if issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields"):
        return StructSequence(kind)
    made: Callable[[type], Protocol] = ObjectLike
    for each in kind.__mro__:
        if each in _BASES:
            made = _BASES[each]
            break
        if each is not object and is_foreign(each):
            return None
    protocol = made(kind)
    if isinstance(protocol, ObjectLike) and protocol.holds_nothing:
        return None
    return protocol
