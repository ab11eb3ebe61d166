"""A copy of a value around other leaves: made as by pickle, in memory.

An object that is referenced twice stays one object. An object that holds itself does so in the
copy, too. An object in which nothing changes is not copied. This only reads the source.
"""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

from dask_devctx.transfer import walk
from dask_devctx.transfer.walk import Registry

# New values by the identity of the old ones. It keeps the old ones, so that ids are not reused.
Memo = dict[int, tuple[Any, Any]]

# Py_TPFLAGS_HEAPTYPE: set for types that a class statement makes.
_HEAP_TYPE = 1 << 9
# Methods by which a type defines how it is pickled, and so copied; only objects have the last two.
_SAID = ["__reduce_ex__", "__reduce__", "__getstate__", "__setstate__"]
_SAID_OF_OBJECTS = [*_SAID, "__getnewargs__", "__getnewargs_ex__"]
# Values of subclasses are made by the built-in type, not by functions that a class overrides.
_PUT: dict[type, Any] = {list: list.extend, dict: dict.update, set: set.update}
_MADE_OF_ITEMS = (tuple, frozenset)

# An object owns such attributes: a copy of a registered type does not share them with its source.
_COLLECTIONS = frozenset([dict, OrderedDict, set])

_registered: dict[type, Callable[[Any], Any]] = {}


def register_copy(
    kind: type,
    parts: walk.Parts = gc.get_referents,
    finish: Callable[[Any], Any] = lambda made: None,
) -> None:
    """Register a type whose values are copied from their attributes, whatever their pickle is.

    ``finish`` is called with the complete copy.
    """
    walk.register_parts(kind, parts)
    _registered[kind] = finish


class _How:
    """How values of a type are copied."""

    def __init__(self, kind: type) -> None:
        bases = kind.__mro__
        self.base = base = next(one for one in bases if one in (*_PUT, *_MADE_OF_ITEMS, object))
        # Called with the complete copy of a registered type.
        self.finish = next((_registered[one] for one in bases if one in _registered), None)
        # Only a type's own code can make another value of a type that defines its own copying, as
        # for pickle, or that is written in another language.
        said = _SAID_OF_OBJECTS if base is object else _SAID
        self.by_reduce = self.finish is None and (
            kind in copyreg.dispatch_table
            or any(_static(kind, name) is not _static(base, name) for name in said)
            or any(not one.__flags__ & _HEAP_TYPE for one in bases[: bases.index(base)])
        )
        has_end = _static(kind, "__del__") is not None
        self.ends = has_end and base is object and self.finish is None


def _static(kind: type, name: str) -> Any:
    return getattr_static(kind, name, None)


_how = Registry.remember(_How)


class Rebuild(pickle.Pickler):
    """Makes one copy, with the new leaves that ``leaf`` returns and keeps in the memo."""

    def __init__(self, leaf: Callable[[Any], Any], memo: Memo) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, 5)
        self._leaf = leaf
        self._known = memo
        self._seen: dict[int, Any] = {}
        self._holders: defaultdict[int, list[Any]] = defaultdict(list)
        self._changed: set[int] = set()
        self._same: list[Any] = []
        # The type that is being copied, for errors; None before any is.
        self.at: type | None = None

    def run(self, root: Any) -> Any:
        """Return a copy of the value with the new leaves; the value itself if no leaf changes."""
        self._discover(root)
        if id(root) in self._changed and id(root) not in self._known:
            self.at = type(root)
            self.dump(root)
            self.at = type(root)
            loader = _Loader(self._file, self._same)
            loader.load()
            made = loader.memo.copy()
            for me, (number, old) in self.memo.copy().items():
                if made[number] is old:
                    self.at = type(old)
                    raise TypeError("its __reduce_ex__ gives the same object again")
                self._known[me] = old, made[number]
        known = self._known.get(id(root))
        return root if known is None else known[1]

    def _discover(self, root: Any) -> None:
        """Search a value, and note all in it that is not to be the same in the copy."""
        for value, parts in walk.walk(root, seen=self._seen):
            if value is walk.LEAF:
                changed = [leaf for leaf in parts if self._leaf(leaf) is not leaf]
            else:
                for part in parts:
                    self._holders[id(part)].append(value)
                known = self._known.get(id(value))
                changes = not self._changed.isdisjoint(map(id, parts))
                changed = [value] if (changes if known is None else known[1] is not value) else []
            while changed:  # all objects that hold a changed object change
                me = id(changed.pop())
                if me not in self._changed:
                    self._changed.add(me)
                    changed += self._holders[me]

    # -- of pickle

    def persistent_id(self, value: Any) -> int | None:
        """Return the place of a value that is not copied here; None for all others."""
        me = id(value)
        if walk.find(type(value)) is not None:
            if me not in self._seen:
                self._discover(value)
            if me in self._known:
                value = self._known[me][1]
            elif me in self._changed:
                return None
        self._same.append(value)
        return len(self._same) - 1

    def reducer_override(self, value: Any) -> Any:
        """Return how to copy an object of a type that is not built in."""
        self.at = kind = type(value)
        how = _how[kind]
        if how.by_reduce:
            reduce = copyreg.dispatch_table.get(kind)
            said = value.__reduce_ex__(4) if reduce is None else reduce(value)
            if not isinstance(said, tuple):
                raise TypeError(f"its __reduce_ex__ names one global object, {said!r}")
            if len(said) > 2 and type(said[2]) is dict:  # maybe the source's own: do not share it
                said = (*said[:2], dict(said[2]), *said[3:])
            return said
        if how.ends:
            raise TypeError("it has a __del__, and a second one like it would end the same twice")
        items, base = [], how.base
        if base is not object:
            items = list(dict.items(value) if base is dict else base.__iter__(value))
        args = (kind, items) if base in _MADE_OF_ITEMS else (kind,)
        # The attributes; those in slots are apart. A metaclass may refuse to be asked for slots.
        if walk.has_slots(kind):
            state = object.__getstate__(value)
        else:
            state = object.__getattribute__(value, "__dict__")
        attributes, slots = state if type(state) is tuple else (state, None)
        if how.finish is not None and attributes is not None:
            attributes = {
                name: copy.copy(part) if type(part) in _COLLECTIONS else part
                for name, part in attributes.items()
            }
        state = _PUT.get(base), items, attributes, slots
        return base.__new__, args, state, None, None, _put


def _put(made: Any, state: tuple[Any, ...]) -> None:
    """Put the items and attributes into a new value."""
    put, items, attributes, slots = state
    if put is not None:
        put(made, items)
    if attributes is not None:
        object.__getattribute__(made, "__dict__").update(attributes)
    for name, part in (slots or {}).items():
        object.__setattr__(made, name, part)
    if (finish := _how[type(made)].finish) is not None:
        finish(made)


class _Loader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, same: list[Any]) -> None:
        file.seek(0)
        super().__init__(file)
        self._same = same

    def persistent_load(self, place: int) -> Any:
        return self._same[place]
