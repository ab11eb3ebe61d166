"""What is known of types of values, and the search through a value, which finds the arrays in it.

Locating, counting and moving all use this search. There are three kinds of types: *plain* types
hold no arrays; a *leaf* is a registered type; all others have parts, which the garbage collector
knows, so that no code of the value's own class runs. Nothing here recurses.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final, NamedTuple

from dask.utils import Dispatch

from dask_devctx.cuda.device import Device

logger = logging.getLogger(__name__)

# The number of objects of a value to look at before the value counts as one without arrays.
AT_MOST: Final = 1000
# The same on the event loop, which waits for it: less than a millisecond.
AT_MOST_ON_LOOP: Final = 100
# The number of parts whose type to look at, for each object of the bound.
_TYPES_PER_OBJECT = 20
# The number of parts of one type in one container to look at first.
_SAMPLE = 16

# No type of these libraries keeps arrays on devices; in the standard library only these modules do.
_HOST_LIBRARIES = frozenset(
    {"dask", "dask_devctx", "distributed", "numpy", "pandas", "pyarrow", "scipy", "tornado"}
)
_STDLIB_HOLDERS = frozenset(
    ["abc", "argparse", "collections", "collections.abc", "contextlib", "typing"]
)
_CONTAINERS = frozenset(
    (dict, list, tuple, set, frozenset, deque, partial, types.MethodType, types.SimpleNamespace)
)

# -- what is known of types


def _by_name(name: str) -> Registry:
    importlib.import_module("dask_devctx.transfer")
    return next(registry for registry in Registry._every if registry._name == name)


class Known(dict[type, Any]):
    """A cache by type that computes what it lacks; what it has costs no call of Python's."""

    def __init__(self, compute: Callable[[type], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, kind: type) -> Any:
        found = self[kind] = self._compute(kind)
        return found


class Registry(Dispatch):  # type: ignore[misc]
    """``dask.utils.Dispatch`` with a default function for types that are not registered."""

    _every: ClassVar[list[Registry]] = []
    # A result in one registry may depend on another registry: a new registration clears all caches.
    _caches: ClassVar[list[Known]] = []
    # Returns the function that is registered for a type, or None.
    find: Callable[[type], Any]

    def __init__(self, name: str, default: Any) -> None:
        super().__init__(name)
        self._name = name
        self._default = default
        self.find = self.remember(self._look_up).__getitem__
        self._every.append(self)
        self.register(object, default)

    @classmethod
    def remember(cls, compute: Callable[[type], Any]) -> Known:
        """Return a cache by type that every registration empties."""
        cls._caches.append(Known(compute))
        return cls._caches[-1]

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _by_name, (self._name,)  # a process has one object of each name, like a function

    def register(self, type: Any, func: Any = None) -> Any:
        """Register a function for a type, or a tuple of types; without one, a decorator."""
        if func is None:
            return functools.partial(self.register, type)
        registered = super().register(type, func)
        for known in self._caches:
            known.clear()
        return registered

    def _look_up(self, kind: type) -> Any:
        found = self.dispatch(kind)
        return None if found is self._default else found

    @classmethod
    def any_knows(cls, kind: type) -> bool:
        """Return whether the type is registered with any registry."""
        return any(registry.find(kind) is not None for registry in cls._every)


# -- the search

Parts = Callable[[Any], Sequence[Any]]

LEAF: Final = "leaf"
_registered: dict[type, Parts] = {}


def register_parts(kind: type, parts: Parts = gc.get_referents) -> None:
    """Register the function that returns the parts of a type's values, also of its subclasses."""
    _registered[kind] = parts
    _found.clear()


_found = Registry.remember(lambda kind: LEAF if Registry.any_knows(kind) else _parts_of(kind))
# Returns a function for the parts of a type's values, ``LEAF``, or None for plain types.
find: Final[Callable[[type], Any]] = _found.__getitem__


def is_plain(value: object) -> bool:
    """Return whether a value holds no arrays; a look at its type, and no search, tells so."""
    found = find(type(value))
    return found is None or (found is _members and not _members(value))


def _parts_of(kind: type) -> Parts | None:
    try:
        for each in kind.__mro__:
            if each in _registered:
                return _registered[each]
        for each in kind.__mro__:
            if each in _CONTAINERS:
                return tuple if kind in (list, tuple) else gc.get_referents  # these in their order
            if (each.__module__, each.__name__) == ("numpy", "ndarray"):
                return _members
            if each is not object and _is_foreign(each):
                return None
        return gc.get_referents if kind.__dictoffset__ or slots(kind) else None
    except Exception:  # a class or metaclass whose attributes cannot be read
        logger.debug("found no way to take a %r apart", kind, exc_info=True)
        return None


def _members(array: Any) -> Any:
    """Return the members of a NumPy array of objects; all other arrays hold none."""
    return list(array.flat) if array.dtype.kind == "O" else ()


def slots(kind: type) -> list[Any]:
    """Return the descriptors of the slots of a type's values."""
    return [
        member
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for member in vars(each).values()
        if type(member) is types.MemberDescriptorType
    ]


def _is_foreign(kind: type) -> bool:
    library = kind.__module__.partition(".")[0]
    if library in sys.stdlib_module_names:
        return kind.__module__ not in _STDLIB_HOLDERS
    return library in _HOST_LIBRARIES


def _by_type(parts: Sequence[Any]) -> dict[type, list[Any]]:
    """Return the parts that may hold arrays, by their type."""
    wanted = {}
    for kind in set(map(type, parts)):
        found = find(kind)
        if found is not None:
            some = [part for part in parts if type(part) is kind]
            if found is _members:
                some = [part for part in some if not is_plain(part)]
            if some:
                wanted[kind] = some
    return wanted


class TooManyError(Exception):
    """A value has more objects than a search looks at."""


def walk(
    root: Any, at_most: int | None = None, seen: dict[int, Any] | None = None
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each object in a value that has parts, with those of its parts that may hold arrays.

    Also yield ``LEAF`` with leaves, of one type and each of them once. ``seen`` has the objects
    that are left out, by their ids, and gets all others. Raise :class:`TooManyError` beyond
    ``at_most`` objects.
    """
    seen = {} if seen is None else seen  # keeps the values, so that ids are not reused
    stack = []
    if id(root) not in seen:
        seen[id(root)] = root
        if find(type(root)) is LEAF:
            yield LEAF, [root]
        elif not is_plain(root):
            stack.append(root)
    while stack:
        value = stack.pop()
        try:
            wanted = _by_type(find(type(value))(value))
        except Exception:
            logger.debug("the parts of a %s cannot be read", type(value), exc_info=True)
            continue
        parts = list(chain.from_iterable(wanted.values()))
        if at_most is not None:
            at_most -= len(parts)
            if at_most < 0:
                raise TooManyError
        yield value, parts
        for kind, some in wanted.items():
            new = {id(part): part for part in some}
            for known in new.keys() & seen.keys():
                del new[known]
            seen.update(new)
            if find(kind) is not LEAF:
                stack.extend(new.values())
            elif new:
                yield LEAF, list(new.values())


def leaves(root: Any, at_most: int | None = None) -> Iterator[Any]:
    """Return the leaves in a value, each of them once."""
    return chain.from_iterable(some for value, some in walk(root, at_most) if value is LEAF)


class Look(NamedTuple):
    """The bytes per device, scaled up from a sample, and whether this covered the whole value."""

    places: dict[Device, int]
    complete: bool


def _spread(parts: Sequence[Any], at_most: int) -> Sequence[Any]:
    """Return at most so many of the parts: the first, the last two, and others at even steps."""
    # The last two of a dictionary are a key and its value.
    n, between = len(parts), at_most - 2
    if n <= at_most:
        return parts
    return [*[parts[index * n // between] for index in range(between)], *parts[-2:]]


def look(root: Any, count: Callable[[Any], dict[Device, int]], at_most: int = AT_MOST) -> Look:
    """Look for arrays, whose bytes ``count`` tells, in at most so many of a value's objects."""
    # The search goes level by level, and looks at a sample of each level first. The items of a list
    # are often similar: a sample finds the arrays in them, however long the list is. The search
    # looks at the other items only if it has found nothing.
    places: dict[Device, int] = {}
    complete = True
    seen = {id(root): root}
    queue: deque[tuple[Any, float]] = deque([(root, 1.0)])
    later: deque[tuple[list[Any], float]] = deque()
    types_left = at_most * _TYPES_PER_OBJECT
    looked = 0
    while looked < at_most and (queue or (later and not places)):
        if not queue:
            rest, scale = later.popleft()
            some = _spread(rest, max(at_most - looked, 3))
            complete &= len(some) == len(rest)
            queue.extend((part, scale) for part in some if id(part) not in seen)
            seen.update((id(part), part) for part in some)
            continue
        value, scale = queue.popleft()
        looked += 1
        found = find(type(value))
        if found is LEAF:
            for device, nbytes in count(value).items():
                places[device] = places.get(device, 0) + round(nbytes * scale)
            continue
        if found is None:
            continue
        try:
            every = found(value)
        except Exception:
            continue
        parts = _spread(every, max(types_left, _SAMPLE))
        types_left -= len(parts)
        wanted = _by_type(parts)
        # NumPy's arrays have objects of one kind: a sample of plain ones, such as texts, is enough.
        complete &= len(parts) == len(every) or (found is _members and not wanted)
        for some in wanted.values():
            sample = _spread(some, _SAMPLE)
            new = {id(part): part for part in sample if id(part) not in seen}
            seen.update(new)
            scaled = 1.0
            if len(new) == len(sample):  # not the same objects, many times
                scaled = scale * len(every) / len(parts) * len(some) / len(sample)
            queue.extend((part, scaled) for part in new.values())
            if len(some) > len(sample):
                later.append((some, scaled))
    return Look(places, complete and not queue and not later)
