"""Plain text for people: aligned columns, and bytes with a unit."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of aligned columns; columns of numbers are aligned to the right.

    Examples
    --------
    >>> print(aligned(("name", "n"), [("one", 1), ("eleven", 11)]))
    name     n
    one      1
    eleven  11
    """
    cells = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [
        all(isinstance(cell, (int, float)) or cell in ("", None) for cell in column)
        for column in zip(*rows, strict=True)
    ] or [False] * len(head)
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [list(head), *cells]
    ]
    return "\n".join(lines)


def shortened(text: str, columns: int) -> str:
    """Return a text of at most so many columns, with "…" in the place of its middle.

    Examples
    --------
    >>> shortened("tcp://127.0.0.1:45821", 12)
    'tcp:/…:45821'
    """
    if len(text) <= columns:
        return text
    end = columns // 2
    return f"{text[: columns - end - 1]}…{text[-end:]}"


def host_of(address: str) -> str:
    """Return the host of a worker, as its address has it."""
    return address.rpartition(":")[0]
