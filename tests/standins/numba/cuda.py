from __future__ import annotations

from typing import Any

manager: Any = None


def set_memory_manager(mm_plugin: Any) -> None:
    global manager
    assert mm_plugin(context=None).interface_version == 1
    manager = mm_plugin
