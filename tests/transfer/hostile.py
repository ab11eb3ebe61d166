"""Types that do not let themselves be copied, looked at, or written to."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Point = namedtuple("Point", "x y")


class Thing:
    """An ordinary object."""

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)
        for index, part in enumerate(parts):
            setattr(self, f"part{index}", part)


class Holder:
    def __init__(self, part: Any) -> None:
        self.part = part


class Slotted:
    __slots__ = ("a", "b", "never_set")

    def __init__(self, a: Any = None, b: Any = None) -> None:
        self.a, self.b = a, b


@dataclasses.dataclass
class Batch:
    data: Any
    label: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    data: Any
    label: Any = None


def _frozen(self: object, *_: Any, **__: Any) -> Any:
    raise TypeError("it is frozen")


class FrozenDict(dict[Any, Any]):
    __setitem__ = update = clear = pop = setdefault = __delitem__ = _frozen


class FrozenList(list[Any]):
    __setitem__ = append = extend = insert = clear = __iadd__ = _frozen


class Shape(tuple[Any, ...]):
    def __new__(cls, *sides: Any) -> Shape:
        return super().__new__(cls, sides)


class PairSet(frozenset[Any]):
    def __new__(cls, a: Any, b: Any) -> PairSet:
        return super().__new__(cls, [a, b])


class TaggedSet(set[Any]):
    def __init__(self, *members: Any) -> None:
        super().__init__(members)
        self.tag = "the first"


class ByReduce:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return type(self), tuple(self.parts)


class ByState(Holder):
    """Leaves its lock out, as for pickle."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self.lock = threading.Lock()

    def __getstate__(self) -> Any:
        return {"part": self.part}

    def __setstate__(self, state: Any) -> None:
        self.__dict__ = state
        self.lock = threading.Lock()


class Unlooked:
    """Raises at all that is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(f"no {name}")


def _refuse(self: object, *_: Any) -> Any:
    raise ValueError(f"not to be looked at, or compared: {type(self)}")


class UnlookedDict(dict[Any, Any]):
    items = keys = values = __iter__ = __getitem__ = __len__ = get = _refuse


class UnlookedList(list[Any]):
    __iter__ = __getitem__ = __len__ = copy = _refuse


class Unequal:
    def __init__(self, part: Any, rank: int = 0) -> None:
        self.part, self.rank = part, rank

    __eq__ = __bool__ = __len__ = _refuse

    def __hash__(self) -> int:
        return id(self)


# How a value around some parts is made, by a name; the parts may be anything.
def object_array(parts: Sequence[Any]) -> Any:
    made = np.empty(len(parts), dtype=object)
    for place, part in enumerate(parts):
        made[place] = part
    return made


CONTAINERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda parts: dict(enumerate(parts)),
    "ordered dict": lambda parts: OrderedDict((str(index), p) for index, p in enumerate(parts)),
    "default dict": lambda parts: defaultdict(list, enumerate(parts)),
    "counter": lambda parts: Counter(dict(enumerate(parts))),
    "chain map": lambda parts: ChainMap(*[{"one": part} for part in parts]),
    "queue": lambda parts: deque(parts, maxlen=len(parts) + 1),
    "named tuple": lambda parts: Point(parts[0], parts[-1]),
    "array of objects": object_array,
    "namespace": lambda parts: types.SimpleNamespace(a=parts[0], b=parts[-1]),
    "partial": lambda parts: functools.partial(len, *parts, key=parts[0]),
    "bound method": lambda parts: Thing(*parts).__init__,  # type: ignore[misc]
    "object": lambda parts: Thing(*parts),
    "slotted": lambda parts: Slotted(parts[0], parts[-1]),
    "dataclass": lambda parts: Batch(parts[0], parts[-1]),
    "frozen and slotted": lambda parts: FrozenSlotted(parts[0], parts[-1]),
    "frozen dict": lambda parts: FrozenDict(enumerate(parts)),
    "frozen list": FrozenList,
    "shape": lambda parts: Shape(*parts),
    "by reduce": lambda parts: ByReduce(*parts),
    "by state": lambda parts: ByState(parts[0]),
    "incomparable": lambda parts: Unequal(parts[0]),
    "dict not to be looked at": lambda parts: UnlookedDict(enumerate(parts)),
    "list not to be looked at": UnlookedList,
    "tagged set": lambda parts: TaggedSet(*map(Unequal, parts, range(len(parts)))),
    "set with its own new": lambda parts: PairSet(Unequal(parts[0]), Unequal(parts[-1], 1)),
}


class Singleton(Holder):
    def __reduce__(self) -> Any:
        return "THE_ONE"


class NotPickled(Holder):
    def __reduce__(self) -> Any:
        raise TypeError("it holds a connection")


class EndsSomething(Holder):
    def __del__(self) -> None:
        pass


UNMOVABLE: dict[type, str] = {
    Singleton: "THE_ONE",
    NotPickled: "it holds a connection",
    EndsSomething: "__del__",
}
