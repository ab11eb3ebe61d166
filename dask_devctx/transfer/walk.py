"""The walk through a value, which finds the arrays in it.

Locating, counting and moving all use this walk. It is not a pytree's. The pytrees of optree, JAX
and torch are trees of registered types, and are rebuilt whole. They never end in a value that holds
itself, and make two objects of one that is referenced twice. Sets, dictionaries' keys and all other
objects are leaves to them. They raise ``RecursionError`` at a depth of 1,000, and have no bound.

Nothing here recurses. There are three kinds of types: *plain* types hold no arrays; a *leaf* is a
registered type; and a :class:`~dask_devctx.transfer.parts.Protocol` takes all others apart.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.parts import Protocol, built_in
from dask_devctx.transfer.registry import Registry

logger = logging.getLogger(__name__)

# The number of objects of a value to look at before the value counts as one without arrays.
AT_MOST: Final = 1000
# The same on the event loop, which waits for it: less than a millisecond.
AT_MOST_ON_LOOP: Final = 100
# The number of parts whose type to look at, for each object of the bound.
_TYPES_PER_OBJECT = 20
# The number of parts of one type in one container to look at first.
_SAMPLE = 16
# The number of parts that tells whether they are different objects.
_HEAD = 256

# No type of these libraries keeps arrays on devices; in the standard library only these modules do.
_HOST_LIBRARIES = frozenset(
    {"dask", "dask_devctx", "distributed", "numpy", "pandas", "pyarrow", "scipy", "tornado"}
)
_STDLIB_HOLDERS = frozenset(
    ["abc", "argparse", "collections", "collections.abc", "contextlib", "typing"]
)

LEAF: Final = "leaf"
_registered: dict[type, Callable[[type], Protocol]] = {}


def register_protocol(kind: type, protocol: Callable[[type], Protocol]) -> None:
    """Register the protocol that takes values of a type and of its subclasses apart."""
    _registered[kind] = protocol
    _found.clear()


_found = Registry.remember(
    lambda kind: LEAF if Registry.any_knows(kind) else _taken_apart(kind),
)
# Returns a protocol for values of a type, ``LEAF``, or None for plain types.
find: Final[Callable[[type], Any]] = _found.__getitem__


def is_plain(value: object) -> bool:
    """Return whether a value holds no arrays; a look at its type, and no search, tells so."""
    found = find(type(value))
    if found is None or found is LEAF:
        return found is None
    return found.holds is not None and not found.holds(value)


def _taken_apart(kind: type) -> Protocol | None:
    try:
        for each in kind.__mro__:
            if each in _registered:
                return _registered[each](kind)
        return built_in(kind, _is_foreign)
    except Exception:  # a class or metaclass whose attributes cannot be read
        logger.debug("found no way to take a %r apart", kind, exc_info=True)
        return None


def _is_foreign(kind: type) -> bool:
    library = kind.__module__.partition(".")[0]
    if library in sys.stdlib_module_names:
        return kind.__module__ not in _STDLIB_HOLDERS
    return library in _HOST_LIBRARIES


def _by_type(parts: Sequence[Any]) -> dict[type, list[Any]]:
    """Return the parts that may hold arrays, by their type."""
    wanted: dict[type, list[Any]] = {
        kind: [] for kind in set(map(type, parts)) if find(kind) is not None
    }
    for kind in wanted:
        holds = getattr(find(kind), "holds", None)
        wanted[kind] = [p for p in parts if type(p) is kind and (holds is None or holds(p))]
    return wanted


class TooManyError(Exception):
    """A value has more objects than a search looks at."""


def walk(root: Any, at_most: int | None = None) -> Iterator[tuple[Any, Protocol | None, list[Any]]]:
    """Yield all objects in a value that may hold arrays.

    ``value, protocol, parts`` is an object with parts, and ``kind, None, leaves`` has the leaves of
    one type, each of them once. An object that cannot be taken apart, or has plain parts only, is
    host data and is left out. Raise :class:`TooManyError` beyond ``at_most`` of them.
    """
    found = find(type(root))
    if found is LEAF:
        yield type(root), None, [root]
    seen = {id(root): root}  # keeps the values, so that ids are not reused
    stack = [root] if isinstance(found, Protocol) else []
    while stack:
        value = stack.pop()
        protocol = find(type(value))
        try:
            parts = protocol.parts(value)
        except Exception:
            logger.debug("the parts of a %s cannot be read", type(value), exc_info=True)
            continue
        wanted = _by_type(parts)
        if not wanted:
            continue
        if at_most is not None:
            at_most -= sum(type(part) in wanted for part in parts)
            if at_most < 0:
                raise TooManyError
        yield value, protocol, parts
        for kind, some in wanted.items():
            new = {id(part): part for part in some}
            for known in new.keys() & seen.keys():
                del new[known]
            seen.update(new)
            if find(kind) is not LEAF:
                stack.extend(new.values())
            elif new:
                yield kind, None, list(new.values())


class Look(NamedTuple):
    """The bytes per device, scaled up from a sample, and whether this covered the whole value."""

    places: dict[Device, int]
    complete: bool


def _spread(parts: Sequence[Any], at_most: int) -> Sequence[Any]:
    """Return at most so many of the parts: the first, the last, and others at even steps."""
    n = len(parts)
    if n <= at_most:
        return parts
    return [parts[index * (n - 1) // (at_most - 1)] for index in range(at_most)]


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
    while queue or (later and not places):
        if looked == at_most:
            return Look(places, False)
        if not queue:
            rest, scale = later.popleft()
            some = _spread(rest, max(at_most - looked, 2))
            complete &= len(some) == len(rest)
            queue.extend((part, scale) for part in some if id(part) not in seen)
            seen.update((id(part), part) for part in some)
            continue
        value, scale = queue.popleft()
        looked += 1
        protocol = find(type(value))
        if protocol is LEAF:
            for device, nbytes in count(value).items():
                places[device] = places.get(device, 0) + round(nbytes * scale)
            continue
        try:
            parts, n_parts = protocol.some(value, max(types_left, _SAMPLE))
        except Exception:
            continue
        types_left -= len(parts)
        wanted = _by_type(parts)
        # NumPy's arrays have objects of one kind: a sample of plain ones, such as texts, is enough.
        complete &= len(parts) == n_parts or (protocol.holds is not None and not wanted)
        for kind_parts in wanted.values():
            sample, scaled = kind_parts, scale * n_parts / len(parts)
            if len(kind_parts) > _SAMPLE:
                later.append((kind_parts, scaled))
                head = kind_parts[:_HEAD]
                different = len(set(map(id, head)))
                if different == len(head):
                    scaled *= len(kind_parts) / _SAMPLE
                else:  # the same objects, many times
                    scaled = max(different / _SAMPLE, 1)
                sample = list(_spread(kind_parts, _SAMPLE))
            new = {id(part): part for part in sample if id(part) not in seen}
            seen.update(new)
            queue.extend((part, scaled) for part in new.values())
    return Look(places, complete and not (later and places))


_told: set[type] = set()


def tell_cut_short(value: object) -> None:
    """Log, once per type, that the search in one of its values was cut short."""
    kind = type(value)
    if kind not in _told:
        _told.add(kind)
        logger.warning(
            "a %s has more than the %d objects that a search for arrays looks at. None was "
            "found, so the value counts as host data and does not move. If it holds arrays, keep "
            "them nearer to its top, or in an object of a type that you register with "
            "device_of.register and to_device.register",
            kind.__qualname__,
            AT_MOST,
        )
