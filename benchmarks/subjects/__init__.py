"""The subjects. Each is a module with ``TITLE`` and ``cases``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from benchmarks.case import Case, Size

_MODULES = {
    "scope": "scope",
    "import": "imports",
    "tasks": "tasks",
    "scale": "scale",
    "page": "page",
    "startup": "startup",
    "transfer": "transfer",
    "between": "between",
    "jobs": "jobs",
    "rechunk": "rechunk",
    "memory": "memory",
}
NAMES = tuple(_MODULES)


class Subject(Protocol):
    """The interface of a subject's module."""

    TITLE: str

    def cases(self, size: Size) -> Iterator[Case]:
        """Yield the cases; each is measured before the next one is made.

        Raises
        ------
        CannotRunError
            The machine does not have what the subject needs.
        """
        ...


def load(name: str) -> Subject:
    return cast(Subject, importlib.import_module(f"benchmarks.subjects.{_MODULES[name]}"))
