"""Replacement of functions in distributed's registries of serializers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register_instead(registry: Any, kind: type, serialize: Callable[..., Any]) -> None:
    """Register a function for a type, and for its subclasses that used the type's old function."""
    found = registry._lookup  # dispatching runs lazy registrations, and this may be one
    theirs = found[kind]
    for each in [each for each, known in found.items() if known is theirs]:
        registry.register(each, serialize)
