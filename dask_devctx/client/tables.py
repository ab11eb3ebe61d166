"""Plain text for people: aligned columns, and bytes with a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

# So much of a UUID tells two devices apart, mostly: "GPU-" and four digits.
_UUID: Final = 8


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


def device_names(devices: Iterable[tuple[str, int, str]]) -> dict[str, str]:
    """Return a short name for each device, by its UUID; a part of the UUID where names clash.

    Examples
    --------
    >>> device_names([("a", 0, "GPU-3807"), ("a", 0, "GPU-b93a"), ("b", 0, "GPU-c1")])
    {'GPU-3807': 'cuda:0 GPU-3807', 'GPU-b93a': 'cuda:0 GPU-b93a', 'GPU-c1': 'cuda:0'}
    """
    known = {uuid: (host, ordinal) for host, ordinal, uuid in devices}
    shared = Counter(known.values())
    length = _UUID
    while length < 40 and len({uuid[:length] for uuid in known}) < len(known):
        length += 4
    return {
        uuid: (f"cuda:{place[1]}" if place[1] >= 0 else uuid[:12])
        + (f" {uuid[:length]}" if shared[place] > 1 and place[1] >= 0 else "")
        for uuid, place in known.items()
    }
