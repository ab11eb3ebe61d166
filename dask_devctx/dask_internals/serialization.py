"""distributed's registries of serializers: another function in the place of one that is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register_instead(registry: Any, kind: type, serialize: Callable[..., Any]) -> None:
    """Register a function for a type and for those of its subclasses that had their base's."""
    found = registry._lookup  # dispatching would call what registers lazily, which this may be
    theirs = found[kind]
    for each in [each for each, known in found.items() if known is theirs]:
        registry.register(each, serialize)
