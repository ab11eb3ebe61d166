"""The walk through a value: where its arrays are, whatever it is made of.

Locating, counting and moving all go this way. It is no pytree's: those of optree, JAX and torch
are trees of registered types, rebuilt whole. They go round for ever in a value that holds itself,
make two of what is referenced twice, take sets, dictionaries' keys and all other objects for
leaves, raise ``RecursionError`` 1,000 deep, and know no bound.

Nothing here recurses. A type belongs to one of three: *plain*, which holds no arrays; a *leaf*,
which somebody registered; and all others, taken apart by a
:class:`~dask_devctx.transfer.protocols.Protocol`.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.objects import built_in
from dask_devctx.transfer.protocols import Protocol, spread
from dask_devctx.transfer.registry import Registry

logger = logging.getLogger(__name__)

# So many objects of a value are looked at before it counts as one without arrays,
AT_MOST: Final = 1000
# and so many where the event loop waits: less than a millisecond.
AT_MOST_ON_LOOP: Final = 100
# The types of so many parts are looked at, for each object of the bound.
_TYPES_PER_OBJECT = 20
# So many of one container's parts of one type are looked at before all others.
_SAMPLE = 16
# Whether they are different is told from so many.
_HEAD = 256

# Nothing of these libraries keeps arrays on devices; of the standard library only some types do.
_HOST_LIBRARIES = frozenset(
    {"dask", "dask_devctx", "distributed", "numpy", "pandas", "pyarrow", "scipy", "tornado"}
)
_STDLIB_HOLDERS = frozenset(
    ["abc", "argparse", "collections", "collections.abc", "contextlib", "typing"]
)

LEAF: Final = "leaf"
_found: dict[type, Any] = Registry.remember()
_registered: dict[type, Callable[[type], Protocol]] = {}


def register_protocol(kind: type, protocol: Callable[[type], Protocol]) -> None:
    """Say how values of a type, and of its subclasses, are taken apart."""
    _registered[kind] = protocol
    _found.clear()


def find(kind: type) -> Any:
    """Return how values of a type are walked: a protocol, ``LEAF``, or None for plain ones."""
    try:
        return _found[kind]
    except KeyError:
        found = LEAF if Registry.any_knows(kind) else _taken_apart(kind)
        _found[kind] = found
        return found


def _taken_apart(kind: type) -> Protocol | None:
    try:
        for each in kind.__mro__:
            if each in _registered:
                return _registered[each](kind)
        return built_in(kind, _is_foreign)
    except Exception:  # a class or metaclass that does not let itself be looked at
        logger.debug("how a %r is taken apart cannot be told", kind, exc_info=True)
        return None


def _is_foreign(kind: type) -> bool:
    module = kind.__module__
    library = module.partition(".")[0]
    if library in sys.stdlib_module_names:
        return module not in _STDLIB_HOLDERS
    return library in _HOST_LIBRARIES


def walk(root: Any) -> Iterator[tuple[Any, Protocol | None, list[Any]]]:
    """Yield all of a value that may hold arrays.

    Yields
    ------
    value, protocol, parts
        For each that is looked into. What cannot be taken apart is host data, and so is what has
        plain parts only: neither is yielded.
    kind, None, leaves
        For leaves of one type, each of them once.
    """
    found = find(type(root))
    if found is LEAF:
        yield type(root), None, [root]
    seen = {id(root): root}  # with the value, so that no other can take its place in memory
    stack = [root] if isinstance(found, Protocol) else []
    while stack:
        value = stack.pop()
        protocol = find(type(value))
        try:
            parts = protocol.parts(value)
        except Exception:
            logger.debug("a %s cannot be looked into", type(value), exc_info=True)
            continue
        wanted = _not_plain(parts)
        if not wanted:
            continue
        yield value, protocol, parts
        for kind in wanted:
            new = {id(part): part for part in parts if type(part) is kind}
            for known in new.keys() & seen.keys():
                del new[known]
            seen.update(new)
            if find(kind) is not LEAF:
                stack.extend(new.values())
            elif new:
                yield kind, None, list(new.values())


def _not_plain(values: Any) -> set[type]:
    return {kind for kind in set(map(type, values)) if find(kind) is not None}


class Look(NamedTuple):
    """What is found in a value by looking at some of it.

    Parameters
    ----------
    places
        The bytes on which devices, scaled up from what was looked at; empty where none was found.
    complete
        Whether all of it was looked at.
    """

    places: dict[Device, int]
    complete: bool


def look(root: Any, count: Callable[[Any], dict[Device, int]], at_most: int = AT_MOST) -> Look:
    """Look for arrays in a value, at no more than so many of its objects.

    Parameters
    ----------
    root
        The value.
    count
        Returns the bytes of a leaf on which devices.
    at_most
        The bound.

    Notes
    -----
    Level by level, some of each level first: what is alike in many items of a list is found in the
    first of them, however long the list and however much else there is. The others have their turn
    where nothing was found.
    """
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
            some = list(spread(rest, max(at_most - looked, 2)))
            complete &= len(some) == len(rest)
            for part in some:
                if id(part) not in seen and find(type(part)) is not None:
                    seen[id(part)] = part
                    queue.append((part, scale))
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
        complete &= len(parts) == n_parts
        wanted = _not_plain(parts)
        if not wanted:
            continue
        scale *= n_parts / len(parts)
        for kind in wanted:
            some = [part for part in parts if type(part) is kind]
            scaled = scale
            if len(some) > _SAMPLE:
                later.append((some, scale))
                head = some[:_HEAD]
                different = len(set(map(id, head)))
                if different == len(head):
                    scaled *= len(some) / _SAMPLE
                else:  # the same ones again and again
                    scaled = max(different / _SAMPLE, 1)
                some = list(spread(some, _SAMPLE))
            new = {id(part): part for part in some if id(part) not in seen}
            seen.update(new)
            queue.extend((part, scaled) for part in new.values())
    return Look(places, complete and not (later and places))


_told: set[type] = set()


def tell_cut_short(value: object) -> None:
    """Say once for a type that one of its values was not looked through."""
    kind = type(value)
    if kind not in _told:
        _told.add(kind)
        logger.warning(
            "a %s has more than the %d objects that are looked at for arrays on devices. None was "
            "found, and such a value counts as host data: tasks are given it as it is. If it holds "
            "arrays, keep them nearer to its top, or in an object of a type that you register with "
            "device_of.register and to_device.register",
            kind.__qualname__,
            AT_MOST,
        )
