"""A dispatch by type that knows what stays on the host, quickly."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any, ClassVar

from dask.utils import Dispatch


def _by_name(name: str) -> Registry:
    importlib.import_module("dask_devctx.transfer")
    return next(registry for registry in Registry._every if registry._name == name)


class Registry(Dispatch):  # type: ignore[misc]
    """``dask.utils.Dispatch`` with a function for all types that nobody registered."""

    # What one registry finds may depend on another, so that all of them are looked up anew.
    _every: ClassVar[list[Registry]] = []

    def __init__(self, name: str, default: Any) -> None:
        super().__init__(name)
        self._name = name
        self._default = default
        self._known: dict[type, Any] = {}
        self._every.append(self)
        self.register(object, default)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _by_name, (self._name,)  # each is one object in a process, as a function is

    def register(self, type: Any, func: Any = None) -> Any:
        """Register a function for a type, or a tuple of types; without one, a decorator."""
        if func is None:
            return functools.partial(self.register, type)
        registered = super().register(type, func)
        for registry in self._every:
            registry._known.clear()
        return registered

    def find(self, kind: type) -> Any:
        """Return what is registered for a type, or None."""
        try:
            return self._known[kind]
        except KeyError:
            found = self._look_up(kind)
            self._known[kind] = found
            return found

    def _look_up(self, kind: type) -> Any:
        found = self.dispatch(kind)
        return None if found is self._default else found

    def is_plain(self, kind: type) -> bool:
        """Return whether nobody registered the type."""
        return self.find(kind) is None

    def all_plain(self, values: Iterable[object]) -> bool:
        """Return whether all ``values`` are of plain types: quick for many."""
        return all(map(self.is_plain, set(map(type, values))))
