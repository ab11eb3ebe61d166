"""A dispatch by type that caches its results, also for types that are not registered."""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

from dask.utils import Dispatch


def _by_name(name: str) -> Registry:
    importlib.import_module("dask_devctx.transfer")
    return next(registry for registry in Registry._every if registry._name == name)


class Registry(Dispatch):  # type: ignore[misc]
    """``dask.utils.Dispatch`` with a default function for types that are not registered."""

    _every: ClassVar[list[Registry]] = []
    # A result in one registry may depend on another registry: a new registration clears all caches.
    _caches: ClassVar[list[dict[type, Any]]] = []

    def __init__(self, name: str, default: Any) -> None:
        super().__init__(name)
        self._name = name
        self._default = default
        self._known = self.remember()
        self._every.append(self)
        self.register(object, default)

    @classmethod
    def remember(cls) -> dict[type, Any]:
        """Return a dictionary by type that every registration empties."""
        cls._caches.append({})
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

    def find(self, kind: type) -> Any:
        """Return the function that is registered for a type, or None."""
        try:
            return self._known[kind]
        except KeyError:
            found = self._known[kind] = self._look_up(kind)
            return found

    def _look_up(self, kind: type) -> Any:
        found = self.dispatch(kind)
        return None if found is self._default else found

    @classmethod
    def any_knows(cls, kind: type) -> bool:
        """Return whether the type is registered with any registry."""
        return any(registry.find(kind) is not None for registry in cls._every)
