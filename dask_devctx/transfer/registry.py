"""A dispatch by type that caches its results, also for types that are not registered."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from dask.utils import Dispatch


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
