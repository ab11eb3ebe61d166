"""The graph of the objects in a value, and the same graph with other leaves.

An object that is referenced twice stays one object. An object that holds itself does so in the
copy, too. An object in which nothing changes is not copied. This only reads the source.
"""

from __future__ import annotations

import copy
import copyreg
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from dask_devctx.transfer import walk
from dask_devctx.transfer.parts import Parts, Protocol

# New values by the identity of the old ones. It keeps the old ones, so that ids are not reused.
Memo = dict[int, tuple[Any, Any]]


class UnmovableError(Exception):
    """A value of this type cannot be copied with other parts."""

    def __init__(self, kind: type, reason: object) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason


class Reduced(Protocol):
    """Copies a value like a pickle does: by its ``__reduce_ex__``, or by ``copyreg``."""

    def items(self, value: Any) -> list[Any]:
        reduce = copyreg.dispatch_table.get(self.kind)
        said = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if not isinstance(said, tuple):
            raise TypeError(f"its __reduce_ex__ names one global object, {said!r}")
        function, args, state, items, pairs, set_state = (*said, None, None, None, None)[:6]
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
        if type(state) is dict:
            state = dict(state)  # it may be the source's own dictionary: do not share it
        if set_state is not None and state is not None:
            set_state(made, state)
            state = None
        put: Any = copy._reconstruct  # type: ignore[attr-defined]  # as copy.copy does
        put(made, None, lambda: made, (), state, iter(members), iter(pairs))


class _Node:
    __slots__ = ("made", "parts", "protocol", "value")

    def __init__(self, value: Any, protocol: Protocol, parts: Parts) -> None:
        self.value = value
        self.protocol = protocol
        self.parts = parts
        self.made: Any = None

    def unless_it_fails(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise UnmovableError(type(self.value), error) from error


class Rebuild:
    """Takes a value apart, and puts it together with the new leaves that ``leaf`` returns.

    The memo has the new values so far: ``leaf`` keeps its results there, and a value in it is not
    copied again.
    """

    def __init__(self, leaf: Callable[[Any], Any], memo: Memo) -> None:
        self._leaf = leaf
        self._memo = memo
        self._nodes: dict[int, _Node] = {}
        self._holders: defaultdict[int, list[_Node]] = defaultdict(list)
        self._changed: dict[int, _Node] = {}
        self._keep: list[Any] = []
        # Those whose making has begun, and those that can only be completed in the end.
        self._begun: set[int] = set()
        self._waiting: set[int] = set()
        self._unfinished: list[tuple[_Node, list[Any]]] = []

    def run(self, root: Any) -> Any:
        """Return a copy of the value with the new leaves; the value itself if no leaf changes.

        Raise :class:`UnmovableError` if an object that holds a changed leaf cannot be copied.
        """
        self._discover(root)
        while reduced := [
            node
            for node in self._changed.values()
            if node.protocol.by_reduce and not isinstance(node.protocol, Reduced)
        ]:
            for node in reduced:
                self._reduce(node)
        if id(root) in self._changed:
            self._make(self._changed[id(root)])
        return self._now(root)

    def _discover(self, root: Any) -> None:
        changed: list[Any] = []
        for value, protocol, parts in walk.walk(root):
            if protocol is None:
                changed += [leaf for leaf in parts if self._leaf(leaf) is not leaf]
                continue
            assert isinstance(parts, Parts)
            known = self._memo.get(id(value))
            if known is not None:
                if known[1] is not value:
                    changed.append(value)
            elif id(value) not in self._nodes:
                self._nodes[id(value)] = _Node(value, protocol, parts)
                self._hold(self._nodes[id(value)])
            elif id(value) in self._changed:
                changed.append(value)
        while changed:  # all objects that hold a changed object change
            for node in self._holders.get(id(changed.pop()), ()):
                if id(node.value) not in self._changed:
                    self._changed[id(node.value)] = node
                    changed.append(node.value)

    def _hold(self, node: _Node) -> None:
        for part in node.parts:
            if walk.find(type(part)) is not None:
                self._holders[id(part)].append(node)

    def _reduce(self, node: _Node) -> None:
        """Take a value apart by its own ``__reduce_ex__`` instead of by its attributes."""
        node.protocol = Reduced(node.protocol.kind)
        self._keep.append(node.parts)
        node.parts = node.unless_it_fails(node.protocol.parts, node.value)
        self._hold(node)
        self._discover(list(node.parts))

    # -- making a changed object: first the parts that the making needs, then it, then the others

    def _make(self, root: _Node) -> None:
        under_way = [self._steps(root)]
        while under_way:
            part = next(under_way[-1], None)
            if part is None:
                under_way.pop()
            else:
                under_way.append(self._steps(part))
        for node, rest in self._unfinished:
            self._fill(node, rest)

    def _steps(self, node: _Node) -> Iterator[_Node]:
        """Make a node; yield the nodes that have to be made before the next step."""
        me = id(node.value)
        if me in self._begun or me in self._memo:
            return
        self._begun.add(me)
        self._waiting.add(me)
        first = node.protocol.first(node.parts)
        needed, rest = node.parts[:first], node.parts[first:]
        yield from self._new(needed)
        if any(id(part) in self._waiting for part in needed):
            raise UnmovableError(type(node.value), "it is made of itself")
        parts = [self._now(part) for part in needed]
        node.made = node.unless_it_fails(node.protocol.begin, node.value, parts)
        self._waiting.discard(me)
        self._memo[me] = node.value, node.made
        yield from self._new(rest)
        if any(id(part) in self._waiting for part in rest):
            self._unfinished.append((node, rest))
        else:
            self._fill(node, rest)

    def _new(self, parts: list[Any]) -> list[_Node]:
        return [self._changed[id(part)] for part in reversed(parts) if id(part) in self._changed]

    def _fill(self, node: _Node, rest: list[Any]) -> None:
        parts = [self._now(part) for part in rest]
        fill = node.protocol.fill
        node.unless_it_fails(fill, node.value, node.made, parts, node.parts.names)

    def _now(self, part: Any) -> Any:
        known = self._memo.get(id(part))
        return part if known is None else known[1]
