"""A dispatch by type that knows what stays on the host, quickly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dask.utils import Dispatch


class Registry(Dispatch):  # type: ignore[misc]
    """``dask.utils.Dispatch`` with a function for all types that nobody registered."""

    def __init__(self, name: str, default: Any) -> None:
        super().__init__(name)
        self._default = default
        self.register(object, default)

    def find(self, kind: type) -> Any:
        """Return what is registered for a type, or None."""
        found = self.dispatch(kind)
        return None if found is self._default else found

    def is_plain(self, kind: type) -> bool:
        """Return whether nobody registered the type."""
        return self.find(kind) is None

    def all_plain(self, values: Iterable[object]) -> bool:
        """Return whether all ``values`` are of plain types: quick for many."""
        return all(map(self.is_plain, set(map(type, values))))
