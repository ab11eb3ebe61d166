"""The graph of the objects in a value, and the same graph with other leaves.

An object that is referenced twice stays one object. An object that holds itself does so in the
copy, too. An object in which nothing changes is not copied. This only reads the source.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from dask_devctx.transfer import walk
from dask_devctx.transfer.protocols import Parts, Protocol, Reduced

# New values by the identity of the old ones. It keeps the old ones, so that ids are not reused.
Memo = dict[int, tuple[Any, Any]]


class UnmovableError(Exception):
    """A value of this type cannot be copied with other parts."""

    def __init__(self, kind: type, reason: object) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason


class _State(Enum):
    NEW = 0
    WAITING = 1  # for the parts that its making needs
    MADE = 2  # other parts may be missing


class _Node:
    __slots__ = ("first", "made", "parts", "protocol", "state", "value")

    def __init__(self, value: Any, protocol: Protocol, parts: Parts) -> None:
        self.value = value
        self.protocol = protocol
        self.parts = parts
        self.first = 0
        self.made: Any = None
        self.state = _State.NEW


class Rebuild:
    """Takes one value apart, and puts it together again with new leaves.

    Parameters
    ----------
    leaf
        Returns the new leaf for a leaf, and keeps it in ``memo``.
    memo
        The new values so far; a value in it is not copied again.
    """

    def __init__(self, leaf: Callable[[Any], Any], memo: Memo) -> None:
        self._leaf = leaf
        self._memo = memo
        self._nodes: dict[int, _Node] = {}
        self._holders: dict[int, list[_Node]] = {}
        self._changed: dict[int, _Node] = {}
        self._keep: list[Any] = []

    def run(self, root: Any) -> Any:
        """Return a copy of the value with the new leaves; the value itself if no leaf changes.

        Raises
        ------
        UnmovableError
            An object in the value holds a leaf that changes, and cannot be copied.
        """
        self._discover(root)
        while reduced := [
            node
            for node in self._changed.values()
            if node.protocol.by_reduce and not isinstance(node.protocol, Reduced)
        ]:
            for node in reduced:
                self._reduce(node)
        changed = self._changed.get(id(root))
        if changed is not None:
            self._make(changed)
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
                node = self._nodes[id(value)] = _Node(value, protocol, parts)
                self._hold(node)
            elif id(value) in self._changed:
                changed.append(value)
        self._spread_change(changed)

    def _hold(self, node: _Node) -> None:
        for part in node.parts:
            if walk.find(type(part)) is not None:
                self._holders.setdefault(id(part), []).append(node)

    def _spread_change(self, changed: list[Any]) -> None:
        """Mark all objects that hold a changed object as changed."""
        while changed:
            for node in self._holders.get(id(changed.pop()), ()):
                if id(node.value) not in self._changed:
                    self._changed[id(node.value)] = node
                    changed.append(node.value)

    def _reduce(self, node: _Node) -> None:
        """Take a value apart by its own ``__reduce_ex__`` instead of by its attributes."""
        node.protocol = Reduced(node.protocol.kind)
        self._keep.append(node.parts)
        try:
            node.parts = node.protocol.parts(node.value)
        except Exception as error:
            raise UnmovableError(type(node.value), error) from error
        self._hold(node)
        self._discover(list(node.parts))

    # -- making a changed object: first the parts that the making needs, then it, then the others

    def _make(self, root: _Node) -> None:
        unfinished: list[_Node] = []
        steps: list[tuple[Callable[..., None], _Node]] = [(self._wait, root)]
        self._steps = steps
        self._unfinished = unfinished
        while steps:
            step, node = steps.pop()
            step(node)
        for node in unfinished:
            self._finish(node, last=True)

    def _wait(self, node: _Node) -> None:
        if node.state is _State.NEW and id(node.value) not in self._memo:
            node.state = _State.WAITING
            node.first = node.protocol.first(node.parts)
            self._steps.append((self._begin, node))
            self._push(node.parts[: node.first])

    def _begin(self, node: _Node) -> None:
        if any(self._is_waiting(part) for part in node.parts[: node.first]):
            raise UnmovableError(type(node.value), "it is made of itself")
        try:
            node.made = node.protocol.begin(
                node.value, [self._now(part) for part in node.parts[: node.first]]
            )
        except Exception as error:
            raise UnmovableError(type(node.value), error) from error
        node.state = _State.MADE
        self._memo[id(node.value)] = node.value, node.made
        self._steps.append((self._finish, node))
        self._push(node.parts[node.first :])

    def _finish(self, node: _Node, *, last: bool = False) -> None:
        rest = node.parts[node.first :]
        if not last and any(self._is_waiting(part) for part in rest):
            self._unfinished.append(node)
            return
        try:
            node.protocol.fill(
                node.value,
                node.made,
                [self._now(part) for part in rest],
                getattr(node.parts, "names", ()),
            )
        except Exception as error:
            raise UnmovableError(type(node.value), error) from error

    def _push(self, parts: list[Any]) -> None:
        for part in parts:
            node = self._changed.get(id(part))
            if node is not None and node.state is _State.NEW:
                self._steps.append((self._wait, node))

    def _is_waiting(self, part: Any) -> bool:
        node = self._changed.get(id(part))
        return node is not None and node.state is _State.WAITING and id(part) not in self._memo

    def _now(self, part: Any) -> Any:
        known = self._memo.get(id(part))
        return part if known is None else known[1]
