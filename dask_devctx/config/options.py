"""What the plugin is told: by arguments, else by the configuration; checked where it is made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from dask.utils import parse_bytes

from dask_devctx import config

# A device's tasks run on the device's own threads, so a worker's `nthreads` is how far dask lets it
# look ahead: too few, and threads wait for the scheduler; too many, and results pile up before they
# are used.
LOOK_AHEAD: Final = 8


def count(key: str, given: object = None, *, least: int = 1) -> Any:
    """Return a whole number; None where neither the argument nor the configuration has one.

    Parameters
    ----------
    key
        The configuration's key.
    given
        The argument of the same name; None where it was not given.
    least
        The least number that will do.

    Raises
    ------
    ValueError
        It is something else.
    """
    value = config.get(key, given)
    if value is None and config.defaults["devctx"][key] is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _refused(key, f"a whole number, {least} or more", value)
    return value


def choice(key: str, given: object, choices: Sequence[object]) -> Any:
    """Return one of some values.

    Raises
    ------
    ValueError
        It is none of them.
    """
    value = config.get(key, given)
    # 1 and 0 equal True and False, and are not meant
    if not any(type(value) is type(one) and value == one for one in choices):
        raise _refused(key, " or ".join(map(repr, choices)), value)
    return value


def fraction(key: str, given: object = None) -> float:
    """Return a part of a device's memory, from 0 to 1.

    Raises
    ------
    ValueError
        It is something else.
    """
    value = config.get(key, given)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise _refused(key, "a fraction of a device's memory between 0 and 1", value)
    return float(value)


def share_of_memory(key: str, given: object = None) -> float:
    """Return a part of a device's memory: a fraction up to 1, or bytes.

    Raises
    ------
    ValueError
        It is something else.
    """
    value = config.get(key, given)
    found = value
    if isinstance(value, str):
        with suppress(ValueError):
            found = parse_bytes(value)
    if isinstance(found, (bool, str)) or not isinstance(found, (int, float)) or found < 0:
        raise _refused(key, "a fraction of a device's memory, or bytes such as '2 GiB'", value)
    return found


def devices(given: object) -> Sequence[object] | None:
    """Return the devices that are named; None for all.

    Raises
    ------
    TypeError
        They are no sequence.
    ValueError
        There are none.
    """
    wanted = config.get("devices", given)
    if wanted is None:
        return None
    if isinstance(wanted, str | bytes) or not isinstance(wanted, Iterable):
        raise TypeError(
            f"devices is a list, got {wanted!r}. Write devices=[0, 1] or devices=['GPU-8f3a'], in "
            "the environment DASK_DEVCTX__DEVICES='[0, 1]' or "
            """DASK_DEVCTX__DEVICES='["GPU-8f3a"]'"""
        )
    if isinstance(wanted, Collection) and not len(wanted):
        raise ValueError("devices is empty. Leave it out for all devices that the worker sees")
    return wanted  # type: ignore[return-value]


def _refused(key: str, expected: str, value: object) -> ValueError:
    name = key.replace("-", "_")
    return ValueError(
        f"{name} must be {expected}, got {value!r} (in the configuration devctx.{key})"
    )
