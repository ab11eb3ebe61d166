"""A copy of a value around other leaves: made as by pickle, in memory.

An object that is referenced twice stays one object. An object that holds itself does so in the
copy, too. An object in which nothing changes is not copied. This only reads the source.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from collections import defaultdict
from collections.abc import Callable
from inspect import getattr_static
from typing import Any, NoReturn

from dask_devctx.transfer import walk
from dask_devctx.transfer.walk import Registry

# New values by the identity of the old ones. It keeps the old ones, so that ids are not reused.
Memo = dict[int, tuple[Any, Any]]

# Py_TPFLAGS_HEAPTYPE: set for types that a class statement makes.
_HEAP_TYPE = 1 << 9
# Methods by which a type defines how it is pickled, and so copied.
_SAID = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
# How values of built-in types get their items: a subclass may override the methods for it.
_PUT: dict[type, Any] = {list: list.extend, dict: dict.update, set: set.update}
_MADE_OF_ITEMS = (tuple, frozenset)

# For a type and its subclasses: what ``__reduce_ex__`` returns, for copies alone.
reduced: dict[type, Callable[[Any], Any]] = {}


# A subclass: CPython 3.13.0 lets nobody set the attributes of the class itself.
_Loader: Any = type("_Loader", (pickle.Unpickler,), {})


def _reduce_of(kind: type) -> Callable[[Any], Any] | None:
    """Return the function that reduces values of a type; None where pickle's own way is right."""
    bases = kind.__mro__
    if known := next((one for one in bases if one in reduced), None):
        return reduced[known]
    base = next(one for one in bases if one in (*_PUT, *_MADE_OF_ITEMS, object))
    if (
        kind in copyreg.dispatch_table
        or any(_static(kind, name) is not _static(base, name) for name in _SAID)
        or any(not one.__flags__ & _HEAP_TYPE for one in bases[: bases.index(base)])
    ):
        return None
    if base is object:
        return None if _static(kind, "__del__") is None else _refuse
    return functools.partial(_of_items, base)


def _static(kind: type, name: str) -> Any:
    return getattr_static(kind, name, None)


def _refuse(value: Any) -> NoReturn:
    raise TypeError("it has a __del__, and a second one like it would end the same twice")


def _of_items(base: Any, value: Any) -> Any:
    """Reduce a value of a subclass of a container: the built-in type reads and makes it."""
    kind = type(value)
    items = list(dict.items(value) if base is dict else base.__iter__(value))
    args = (kind, items) if base in _MADE_OF_ITEMS else (kind,)
    return base.__new__, args, (items, object.__getstate__(value)), None, None, _put


def _put(made: Any, state: tuple[Any, ...]) -> None:
    items, attributes = state
    for base, put in _PUT.items():
        if isinstance(made, base):
            put(made, items)
    own, slots = attributes if type(attributes) is tuple else (attributes, None)
    if own:
        vars(made).update(own)
    for name, part in (slots or {}).items():
        object.__setattr__(made, name, part)


_reduce = Registry.remember(_reduce_of)


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
            self._file.seek(0)
            loader: Any = _Loader(self._file)
            loader.persistent_load = self._same.__getitem__
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
        self.at = type(value)
        reduce = _reduce[self.at]
        return NotImplemented if reduce is None else reduce(value)
