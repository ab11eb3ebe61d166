"""The checks of options: a function of an option's name and value returns the value to keep."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, Final

from dask.utils import parse_bytes, parse_timedelta

from dask_devctx import config
from dask_devctx.errors import nearest

# A function of an option's name and value that returns the value to keep, or raises.
Check = Callable[[str, Any], object]

# A smaller limit in bytes is a mistake, such as 8 for "8 GiB" or 80 for 0.8.
_LEAST_LIMIT_NBYTES: Final = 1024


def key_of(name: str) -> str:
    """Return the key of an option in the configuration."""
    return name.replace("_", "-")


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as dask's configuration has them."""
    return {f"devctx.{key_of(name)}": value for name, value in options.items()}


def whole_number(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise refused(name, f"a whole number, {least} or more", value)
        return int(value)

    return check


def one_of(*choices: object) -> Check:
    def check(name: str, value: Any) -> object:
        # 1 and 0 equal True and False, but are refused
        if not any(type(value) is type(one) and value == one for one in choices):
            raise refused(name, " or ".join(map(repr, choices)), value)
        return value

    return check


flag: Final = one_of(True, False)


def _amount(value: Any) -> float | None:
    """Return a number, or the bytes that a text says; None for anything else."""
    if isinstance(value, str):
        with suppress(ValueError, OverflowError):
            value = float(value) if value.replace(".", "", 1).isdigit() else parse_bytes(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return value if is_number and 0 <= value < float("inf") else None


def fraction(name: str, value: Any) -> float:
    found = None if isinstance(value, str) else _amount(value)
    if found is None or found > 1:
        raise refused(name, "a fraction of a device's memory between 0 and 1", value)
    return float(found)


def share_of_memory(name: str, value: Any) -> float:
    found = _amount(value)
    if found is None:
        raise refused(name, "a fraction of a device's memory, or bytes such as '2 GiB'", value)
    return float(found)


def memory_limit(name: str, value: Any) -> float | str | None:
    if value is None or value in ("auto", "default"):  # the second is dask-cuda's word
        return value and "auto"
    return memory_size(name, value, "'auto', ")


def memory_size(name: str, value: Any, also: str = "") -> float | str | None:
    found = _amount(value)
    if isinstance(value, str) and value[-1:].isalpha() and 1 <= (found or 0) < _LEAST_LIMIT_NBYTES:
        return value  # with its unit, "30 B" is no mistake
    if found is None or 1 < found < _LEAST_LIMIT_NBYTES:
        raise refused(
            name,
            f"{also}a fraction of a device's memory up to 1, bytes such as '12 GiB' "
            f"({_LEAST_LIMIT_NBYTES} or more), or 0 or None for none",
            value,
        )
    return (float(found) if found <= 1 else int(found)) or None


def names_of(*known: str) -> Check:
    """Return a check of a list of names, or of text with commas; without ``known``, of any."""

    def check(name: str, value: Any) -> tuple[str, ...] | None:
        found = value.split(",") if isinstance(value, str) else value
        if not isinstance(found, Iterable) or not all(isinstance(one, str) for one in found):
            raise refused(name, "a list of names, or text with commas", value)
        names = tuple(one.strip() for one in found if one.strip())
        if known and not set(names) <= set(known):
            raise refused(name, f"a list of some of {', '.join(map(repr, known))}", value)
        return names or None

    return check


def path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise refused(name, "a path", value)
    return str(os.fspath(value))


def duration(name: str, value: Any) -> float:
    try:
        return float(parse_timedelta(value) or 0)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise refused(name, "a duration such as '30s'", value) from None


LIBRARIES: Final = ("cupy", "torch", "numba")
# RMM's settings, by dask-cuda's names without "rmm_".
RMM: Final[Mapping[str, Check]] = {
    "pool_size": memory_size,
    "maximum_pool_size": memory_size,
    "managed_memory": flag,
    "async": flag,
    "release_threshold": memory_size,
    "log_directory": path,
    "track_allocations": flag,
    "allocator_external_lib_list": names_of(*LIBRARIES),
}


def allocator(name: str, value: Any) -> str | dict[str, object] | None:
    """Return RMM's settings without those that are None; refuse contradictions."""
    if value == "cupy-async":
        return "cupy-async"
    if not isinstance(value, Mapping):
        raise refused(name, "'cupy-async', or RMM's settings such as {'pool_size': 0.8}", value)
    rmm: dict[str, Any] = {}
    for given, setting in value.items():
        one = str(given).replace("-", "_").removeprefix("rmm_")
        if one not in RMM:
            near = nearest(one, RMM)
            meant = f"Did you mean {near!r}?" if near else f"It may have {', '.join(RMM)}"
            raise ValueError(f"{name} has no setting {given!r}. {meant}")
        if setting is not None and (found := RMM[one](f"rmm_{one}", setting)) is not None:
            rmm[one] = found
    if rmm.get("async") and rmm.get("managed_memory"):
        raise ValueError(
            "rmm_managed_memory is incompatible with rmm_async: managed memory has no asynchronous "
            "allocator. Leave one of them out"
        )
    if "release_threshold" in rmm and not rmm.get("async"):
        raise ValueError("rmm_release_threshold requires rmm_async=True: only that has a threshold")
    if "maximum_pool_size" in rmm and not (rmm.get("async") or "pool_size" in rmm):
        raise ValueError(
            "rmm_maximum_pool_size limits a pool, and there is none. Give rmm_pool_size, or "
            "rmm_async=True"
        )
    return rmm or None


def list_of_devices(name: str, value: Any) -> tuple[object, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} is a list, got {value!r}. Write devices=[0, 1] or devices=['GPU-8f3a'], in "
            "the environment DASK_DEVCTX__DEVICES='[0, 1]' or "
            """DASK_DEVCTX__DEVICES='["GPU-8f3a"]'"""
        )
    devices = tuple(value)
    if not devices:
        raise ValueError(f"{name} is empty. Leave it out for all devices that the worker sees")
    if len(set(map(str, devices))) < len(devices):
        raise ValueError(f"{name} names each device once, got {value!r}")
    return devices


def function(name: str, value: Any) -> object:
    if not callable(value) or inspect.iscoroutinefunction(value) or value in (min, max):
        raise TypeError(
            f"{name} must be a function of one argument, such as dask_devctx.start_soonest: it "
            "gets the candidates, which cannot be compared, and returns one of them; got "
            f"{value!r}"
        )
    return value


def refused(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {expected}, got {value!r}")


def configured(check: Check, name: str, value: Any) -> Any:
    """Check a value of the configuration; the error names its key."""
    try:
        return check(name, value)
    except (TypeError, ValueError) as error:
        where = f"in the configuration devctx.{key_of(name)}"
        raise type(error)(f"{error} ({where})") from None


def missing_device_timeout_s() -> float:
    """Return how long a task waits for a device that may come back, by the configuration."""
    key = "missing-device-timeout"
    return float(configured(duration, key, config.get(key)))
