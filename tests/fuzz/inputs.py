"""Random pieces of right and wrong input."""

from __future__ import annotations

import random
from typing import Any

MIG = tuple(f"MIG-00000000-0000-0000-0000-00000000000{n}" for n in range(2))
UUIDS = [f"GPU-b33ebc8{n}-95a3-9648-c914-5259efe7a11e" for n in range(4)]
PIECES = [
    *UUIDS, *MIG, "GPU-", "MIG-", "gpu-", "GPU-b33ebc80", "b33ebc80", "cuda", "cuda:", "gpu:",
    "auto", "none", "0000:01:00.0", "00000000:01:00.0", "01:00.0", "NoDevFiles", "0", "1", "3", "4",
    "-1",
    "-0", "+1", "01", "0x1", "1.5", "1e3", "2147483648", "4294967296", "9223372036854775807",
    "9" * 40, ",", ",,", ", ", ";", ":", "-", " ", "\t", "\n", "\0", "\x0b", "", "all", "void", "٣",
    "²", "é", "\U0001f600", "\udc80", "None", "True", "nan", "inf", "[0]", "{}", "%s", "../",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.0, 0.5, float("nan"), float("inf"), 10**30, b"0", (), [0],
    {"a": 1}, {1}, object(), type, int, lambda key: 1, 1j, Ellipsis, NotImplemented, range(2),
]  # fmt: skip


def text(chance: random.Random) -> str:
    parts = [chance.choice(PIECES) for _ in range(chance.randint(0, 5))]
    value = chance.choice(["", ",", ", ", ":"]).join(parts)
    for _ in range(chance.choice([0, 0, 1, 3])):  # and noise
        place = chance.randint(0, len(value))
        value = (
            value[:place] + chr(chance.randint(0, 0x24F)) + value[place + chance.randint(0, 1) :]
        )
    return value


def anything(chance: random.Random) -> Any:
    kind = chance.random()
    if kind < 0.6:
        return text(chance)
    if kind < 0.8:
        return chance.randint(-(2 ** chance.randint(1, 70)), 2 ** chance.randint(1, 70))
    return chance.choice(VALUES)


def replaced(chance: random.Random, value: Any, rate: float = 0.05) -> Any:
    """Return plain data with some parts of it replaced, left out or doubled."""
    if chance.random() < rate:
        return anything(chance)
    if isinstance(value, dict):
        kept = {key: replaced(chance, one, rate) for key, one in value.items()}
        return {key: one for key, one in kept.items() if chance.random() > rate / 2}
    if isinstance(value, list | tuple):
        found = [replaced(chance, one, rate) for one in value]
        if found and chance.random() < rate:
            found.insert(chance.randrange(len(found)), chance.choice(found))
        if found and chance.random() < rate:
            del found[chance.randrange(len(found))]
        return type(value)(found)
    return value
