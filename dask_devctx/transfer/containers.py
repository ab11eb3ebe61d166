"""Protocols for Python's containers and other types that hold values."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice, product
from typing import Any

from dask_devctx.transfer.protocols import Parts, Protocol


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
    """Tuples and named tuples; their own ``__new__`` is not called: its arguments are unknown."""

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
    """Named tuples that are made in C, such as ``os.terminal_size`` and torch's results."""

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
    """Dictionaries, both keys and values: an optimizer's state has tensors as keys."""

    base: type[dict[Any, Any]] = dict

    def items(self, value: Any) -> list[Any]:
        if self.kind is dict:  # a subclass may override the methods that a copy calls
            copied = value.copy()  # takes a third of the time of pairs
            return [*copied, *copied.values()]
        pairs = self.base.items(value)
        return [key for key, _ in pairs] + [item for _, item in pairs]

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


class ObjectArrayLike(Protocol):
    """NumPy's arrays of objects; all its other arrays hold no other values."""

    def __init__(self, kind: type) -> None:
        self.base = kind
        super().__init__(kind)

    @staticmethod
    def holds(value: Any) -> bool:
        return bool(value.dtype.kind == "O" and value.ndim)

    def items(self, value: Any) -> list[Any]:
        return list(value.flat) if self.holds(value) else []

    def begin(self, value: Any, parts: list[Any]) -> Any:
        return value.copy(order="K")

    def finish(self, value: Any, made: Any, items: list[Any]) -> None:
        # One by one: NumPy would take several that are arrays for rows.
        for index, item in zip(product(*map(range, made.shape)), items, strict=True):
            made[index] = item
        made.flags.writeable = value.flags.writeable

    def some_items(self, value: Any, at_most: int) -> tuple[Sequence[Any], int]:
        n = value.size
        if n <= at_most or not self.holds(value):
            return self.items(value), n
        return [*value.flat[:: -(-n // (at_most - 1))], value.flat[-1]], n


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
