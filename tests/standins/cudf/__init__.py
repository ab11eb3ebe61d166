"""cuDF: its options."""

from __future__ import annotations

_options: dict[str, object] = {"spill": False, "spill_stats": 0}


def get_option(name: str) -> object:
    return _options[name]


def set_option(name: str, val: object) -> None:
    assert name in _options
    _options[name] = val
