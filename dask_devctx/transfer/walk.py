"""What is known of types of values, and the search through a value, which finds the arrays in it.

Locating, counting and moving all use this search. There are three kinds of types: *plain* types
hold no arrays; a *leaf* is a registered type; all others have parts, which the garbage collector
knows, so that no code of the value's own class runs. Nothing here recurses.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Final

from dask.utils import Dispatch

try:
    from dask_devctx.driver._scope import few as few_in_c
except ImportError:  # it was not built
    few_in_c = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# The number of objects of a value to look at before the value counts as one without arrays.
AT_MOST: Final = 1000
# The same on the event loop, which waits for it: less than a millisecond.
AT_MOST_ON_LOOP: Final = 100
# The number of parts whose type to look at, for each object of the bound.
_TYPES_PER_OBJECT = 20
# A value of fewer objects is searched without order.
_FEW: Final = 32
# The number of parts of one type in one object to look at first.
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

    every: ClassVar[list[Registry]] = []
    # A result in one registry may depend on another registry: a new registration clears all caches.
    _caches: ClassVar[list[Known]] = []
    # Returns the function that is registered for a type, or None.
    find: Callable[[type], Any]

    def __init__(self, name: str, default: Any) -> None:
        super().__init__(name)
        self.__module__ = "dask_devctx.transfer"  # with its name, where pickle finds it
        self._default, self._own = default, dict[Any, Any]()
        self.find = self.remember(self._look_up).__getitem__
        self.every.append(self)
        self.register(object, default)

    @classmethod
    def remember(cls, compute: Callable[[type], Any]) -> Known:
        """Return a cache by type that every registration empties."""
        cls._caches.append(Known(compute))
        return cls._caches[-1]

    def __reduce__(self) -> str:
        return str(self.__name__)  # a process has one object of each name, like a function

    def register(self, type: Any, func: Any = None) -> Any:
        """Register a function for a type, or a tuple of types; without one, a decorator."""
        if func is None:
            return functools.partial(self.register, type)
        self._own[type] = func
        registered = super().register(type, func)  # a tuple's types one by one
        for known in self._caches:
            known.clear()
        return registered

    def dispatch(self, cls: type) -> Any:
        super().dispatch(cls)  # for a library's import alone: its answer for a subclass is for good
        return next(self._own[one] for one in cls.__mro__ if one in self._own)

    def _look_up(self, kind: type) -> Any:
        found = self.dispatch(kind)
        return None if found is self._default else found


# -- the search

Parts = Callable[[Any], Sequence[Any]]

LEAF: Final = "leaf"
_registered: dict[type, Parts] = {}


def register_parts(kind: type, parts: Parts) -> None:
    """Register the function that returns the parts of a type's values, also of its subclasses."""
    _registered[kind] = parts
    _found.clear()


def is_plain(value: object) -> bool:
    """Return whether a value holds no arrays; a look at its type, and no search, tells so."""
    found = find(type(value))
    return found is None or (found is _members and not _members(value))


def _parts_of(kind: type) -> Any:
    if any(registry.find(kind) is not None for registry in Registry.every):
        return LEAF
    try:
        for each in kind.__mro__:
            if each in _registered:
                return _registered[each]
        for each in kind.__mro__:
            if each in _CONTAINERS:
                return _itself if kind in (list, tuple) else gc.get_referents  # in their order
            if (each.__module__, each.__name__) == ("numpy", "ndarray"):
                return _members
            if each is not object and _is_foreign(each):
                return None
        has_slots = any("__slots__" in vars(each) for each in kind.__mro__)
        return gc.get_referents if kind.__dictoffset__ or has_slots else None
    except Exception:  # a class or metaclass whose attributes cannot be read
        logger.debug("found no way to take a %r apart", kind, exc_info=True)
        return None


def _itself(parts: Any) -> Any:
    return parts  # no copy: it may be long


_found = Registry.remember(_parts_of)
# Returns a function for the parts of a type's values, ``LEAF``, or None for plain types.
find: Final[Callable[[type], Any]] = _found.__getitem__


def _members(array: Any) -> Any:
    """Return the members of a NumPy array of objects; all other arrays hold none."""
    return list(array.flat) if array.dtype.kind == "O" else ()


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
    that are left out, by their ids, and gets all others. Raise :class:`TooManyError` in the end if
    there are more than ``at_most`` objects.
    """
    # Level by level, the first and last few parts of each type in an object first. The items of a
    # list are often similar: so a search with a bound finds the arrays in them, however long it is.
    seen = {} if seen is None else seen  # keeps the values, so that ids are not reused
    first, later = deque[Any](), deque[Any]()
    most = sys.maxsize if at_most is None else at_most
    types_left, looked, complete = most * _TYPES_PER_OBJECT, 0, True
    if id(root) not in seen:
        seen[id(root)] = root
        if find(type(root)) is LEAF:
            yield LEAF, [root]
        elif not is_plain(root):
            first.append(root)
    while looked < most and (first or later):
        value = (first or later).popleft()
        looked += 1
        found = find(type(value))
        try:
            every = found(value)
            parts = _ends(every, max(types_left, _SAMPLE))
            wanted = _by_type(parts)
        except Exception:
            logger.debug("the parts of a %s cannot be read", type(value), exc_info=True)
            continue
        types_left -= len(parts)
        yield value, list(chain.from_iterable(wanted.values()))
        for kind, some in wanted.items():
            new = {id(part): part for part in some}
            for known in new.keys() & seen.keys():
                del new[known]
            seen.update(new)
            fresh = list(new.values())
            if find(kind) is LEAF:
                leaves = fresh[: most - looked]
                looked += len(leaves)
                complete &= len(leaves) == len(fresh)
                if leaves:
                    yield LEAF, leaves
            else:
                first += _ends(fresh, _SAMPLE)
                later += fresh[_SAMPLE - 2 : -2]
        # NumPy's arrays have objects of one kind: the ends of plain ones, such as texts, do.
        complete &= len(parts) == len(every) or (found is _members and not wanted)
    if first or later or not complete:
        raise TooManyError


def _ends(parts: Sequence[Any], at_most: int) -> Sequence[Any]:
    """Return at most so many of the parts: the first, and the last two."""
    # The last two of a dictionary are a key and its value.
    return parts if len(parts) <= at_most else [*parts[: at_most - 2], *parts[-2:]]


def leaves(root: Any, at_most: int | None = None) -> Iterable[Any]:
    """Return the leaves in a value, each of them once."""
    found = few(root)
    if found is not None:
        return found
    return chain.from_iterable(some for value, some in walk(root, at_most) if value is LEAF)


def few(root: Any, at_most: int = _FEW) -> list[Any] | None:
    """Return the leaves in a value, each once; None if it is not one of a few objects. Fast."""
    # In C alone, see csrc/search.h: a walk finds the same.
    return None if few_in_c is None else few_in_c(root, _found, LEAF, at_most)
