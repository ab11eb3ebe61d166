"""The devices that a task asks for, by its annotations or by its function.

``device`` names one device. ``devices`` asks for several at once, ``device_share`` for a part of
each, and ``device_memory`` reserves bytes on each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, Final, Literal, NamedTuple

from dask.utils import parse_bytes

from dask_devctx.cuda import naming
from dask_devctx.cuda.naming import ACCEPTED, AUTO, CURRENT, NO_DEVICE
from dask_devctx.errors import COUNTS_OF_GPUS, nearest

DEVICE: Final = "device"
DEVICES: Final = "devices"
SHARE: Final = "device_share"
MEMORY: Final = "device_memory"

NAMES: Final = frozenset({DEVICE, DEVICES, SHARE, MEMORY})

Unannotated = Literal["assign", "leave"]
ALL: Final = "all"
_BEYOND_ONE: Final = NAMES - {DEVICE}


class Request(NamedTuple):
    """The devices that a task asks for; the names of devices are not checked yet."""

    names: tuple[Any, ...] = ()
    number: int | None = 1
    share: float | None = None
    nbytes: int | None = None
    plain: bool = False

    @property
    def name(self) -> Any:
        """The one device that it asks for, as an argument for ``Device``; "auto" for any."""
        return self.names[0] if self.names else AUTO

    def __str__(self) -> str:
        devices = f"devices={list(self.names)!r}" if self.names else f"devices={self.number or ALL}"
        share = "" if self.share is None else f", {SHARE}={self.share:g}"
        memory = "" if self.nbytes is None else f", {MEMORY}={self.nbytes}"
        return devices + share + memory


# Compare with `is`: each request that says the same as one of these is this object.
ANY_DEVICE: Final = Request(plain=True)
HOST_ONLY: Final = Request(number=0, plain=True)


def requested_device(
    annotations: Mapping[str, Any] | None, unannotated: Unannotated, task: object = None
) -> Request:
    """Return what a task asks for; an annotation takes precedence over the task's function."""
    function: Any = getattr(task, "func", None)
    carried = function.which if getattr(type(function), "carries_device", False) else None
    if annotations and not _BEYOND_ONE.isdisjoint(annotations):
        return _read(annotations, carried)
    if annotations and DEVICE in annotations:
        asked = _of_one(annotations[DEVICE])
        if carried is None or asked is not ANY_DEVICE:
            return asked
    elif carried is None:
        return ANY_DEVICE if unannotated == "assign" else HOST_ONLY
    return _of_one(carried)


def _of_one(wanted: Any) -> Request:
    if wanted is None:
        return HOST_ONLY
    if wanted.__class__ is int or isinstance(wanted, str):
        return _known(wanted)
    return Request((wanted,), plain=True)


@functools.lru_cache(typed=True)
def _known(wanted: int | str) -> Request:
    if wanted == NO_DEVICE:
        return HOST_ONLY
    # A task's current device is the device that it gets.
    return ANY_DEVICE if wanted == AUTO or wanted in CURRENT else Request((wanted,), plain=True)


def _read(annotations: Mapping[str, Any], carried: object) -> Request:
    """Return the request of a task with other annotations than ``device`` alone."""
    one, several, share, memory = map(annotations.get, (DEVICE, DEVICES, SHARE, MEMORY))
    if DEVICE in annotations and DEVICES in annotations:
        raise ValueError(
            f"the annotations {DEVICE!r} and {DEVICES!r} exclude each other, got "
            f"{DEVICE}={one!r} and {DEVICES}={several!r}. Give {DEVICE} for one device, {DEVICES} "
            "for several at once"
        )
    if DEVICES in annotations:
        asked = HOST_ONLY if several is None else _several(several)
    else:
        asked = _of_one(one) if DEVICE in annotations else ANY_DEVICE
    if asked is HOST_ONLY:
        if share is not None or memory is not None:
            raise ValueError(
                f"the task asks for no device ({DEVICE}=None), and for a part of one "
                f"({SHARE}={share!r}, {MEMORY}={memory!r}). Leave one of them out"
            )
        return HOST_ONLY
    if carried is not None and not asked.names and asked.number == 1:
        asked = _of_one(carried)
    return Request(asked.names, asked.number, _share(share), _nbytes(memory))


def not_an_annotation(wanted: object) -> TypeError:
    """Return the error for an annotation ``device`` that names no device."""
    remedy = ""
    if isinstance(wanted, list | tuple):  # a list reaches the worker as a tuple
        remedy = (
            f". For several devices at once, write dask.annotate(devices={list(wanted)!r}); for "
            f"an item on each, [client.submit(on_device(n)(function), item) for n, item in "
            f"zip({list(wanted)!r}, items)]"
        )
    return TypeError(
        f'the annotation \'device\' is {ACCEPTED}; "auto" for any device, None or "none" for '
        "none; or a function that is given the task's key and returns one of these; got "
        f"{wanted!r} of type {type(wanted).__name__}{remedy}"
    )


# -- the values of the annotations, and the errors for others


_SEVERAL: Final = (
    f'a number of devices, at least 1, a list of devices ([0, 1], or UUIDs), "{ALL}" for all '
    "devices of a worker, or a function that is given the task's key and returns one of these"
)
_PART: Final = (
    "the part of a device that a task takes, a number above 0 and at most 1 (for several devices, "
    f"write dask.annotate({DEVICES}=2))"
)
_BYTES: Final = (
    'the memory that a task reserves on a device: bytes, at least 1, or text such as "4 GiB"'
)


def _wrong(name: str, expected: str, given: object, *, is_kind: bool = False) -> Exception:
    """Return the error of a value that is not expected, or is of that kind and out of range."""
    text = f"the annotation {name!r} is {expected}; got {given!r}"
    return ValueError(text) if is_kind else TypeError(f"{text} of type {type(given).__name__}")


def _several(given: object) -> Request:
    """Return what the annotation ``devices`` asks for."""
    if isinstance(given, str) and given in (ALL, NO_DEVICE):
        return Request(number=None) if given == ALL else HOST_ONLY
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview):
        if not given or any(isinstance(name, bool | float) or name is None for name in given):
            raise _wrong(DEVICES, _SEVERAL, given, is_kind=not given)
        return Request(tuple(given), len(given))
    count = _whole(given)
    if count is None or count < 1:
        right = _meant_by(given)
        expected = f"{_SEVERAL} (or write dask.annotate({right}))" if right else _SEVERAL
        raise _wrong(DEVICES, expected, given, is_kind=count is not None)
    return Request(number=count)


def _meant_by(given: object) -> str:
    """Return the annotation that a wrong value of ``devices`` means; "" if that is not clear."""
    if isinstance(given, float):
        if 0 < given < 1:
            return f"{SHARE}={given!r}"
        return f"{DEVICES}={given:.0f}" if given > 0 and given.is_integer() else ""
    names = sorted(given, key=str) if isinstance(given, Set) else []
    if names := naming.listed(given) if isinstance(given, str) else names:
        return f"{DEVICES}={names}"
    if isinstance(given, bool | Iterable) and not isinstance(given, str):
        return ""
    return f"{DEVICE}={given!r}"


def _whole(given: Any) -> int | None:
    """Return a whole number, of NumPy too; else None, also for a ``Device``, which has an index."""
    return int(given) if isinstance(given, Integral) and not isinstance(given, bool) else None


def _share(given: Any) -> float | None:
    if given is None:
        return None
    share = float(given) if isinstance(given, Real) and not isinstance(given, bool) else math.nan
    if not 0 < share <= 1:
        raise _wrong(SHARE, _PART, given, is_kind=not math.isnan(share))
    return share


def _nbytes(given: Any) -> int | None:
    if given is None:
        return None
    amount = given if isinstance(given, str | float) else _whole(given)
    if amount is None:
        raise _wrong(MEMORY, _BYTES, given)
    nbytes = 0
    with suppress(ValueError, OverflowError):
        nbytes = int(parse_bytes(amount))
    if nbytes < 1:
        raise _wrong(MEMORY, _BYTES, given, is_kind=True)
    return nbytes


# -- a task's runs after a device failed: the user's annotation, and the scheduler's marks, which
# reach the worker as annotations do

# Whether a task may run again after a device failed while it ran.
RERUN: Final = "rerun"
OURS: Final = NAMES | {RERUN}
# Marks a task that may have broken a device. The worker isolates its run. The value is the
# number of this isolated run, and how many such runs a task may have.
ISOLATED: Final = "devctx-isolated"
# Marks a task that a worker fails without a call of it. The value has the fields of the error.
REFUSED: Final = "devctx-refused"


def may_rerun(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations may run again after a device failed."""
    given = True if not annotations else annotations.get(RERUN, True)
    if not isinstance(given, bool):
        raise TypeError(
            f"the annotation {RERUN!r} is True or False: whether the task may run again after a "
            f"device failed while it ran; got {given!r} of type {type(given).__name__}"
        )
    return given


def runs_once(annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a task with these annotations must not run twice."""
    return annotations is not None and annotations.get(RERUN) is False


def isolated_run(annotations: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the number of a task's isolated run, and how many it may have; zeros for others."""
    run, most = (annotations or {}).get(ISOLATED, (0, 0))
    return run, most


def had_all_runs(run: int, most: int) -> str:
    """Return why a task does not run again after this isolated run of ``most``; "" if it does."""
    if run < most:
        return ""
    return (
        f"a device failed in each of its {run + 1} runs. distributed.scheduler.allowed-failures is "
        f"{most}"
    )


# -- annotations that are mistaken for those of this package, or that nobody reads

# Annotations that seem to be ours, but mean nothing to this package and dask, with the right one.
_MISTAKEN: Final = {
    **dict.fromkeys(("device", "cuda", "gpu", "device_id", "gpu_id", "cuda_device"), DEVICE),
    **dict.fromkeys(("devices", "num_devices", *COUNTS_OF_GPUS), DEVICES),
    **dict.fromkeys(("device_fraction", "share"), SHARE),
    **dict.fromkeys(("device_mem", "device_memory_limit", "gpu_memory"), MEMORY),
}
_OPTIONS: Final = frozenset({"oom_retries", "tasks_per_device"})  # of the plugin
# Names as like ours as "devcie" and "device_memry". A service and a return are less so.
_ALIKE: Final = 0.82


@functools.cache
def _meant(name: str) -> str:
    """Return the annotation that another name seems to mean; "" if it means none."""
    if name in OURS:
        return ""
    near = nearest(name, OURS, _ALIKE)
    return _MISTAKEN.get(name.casefold()) or (near if near[:1] == name[:1] else "")


def mistaken(annotations: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each annotation that seems to be ours but means nothing."""
    for name, value in annotations.items():
        if meant := _meant(name):
            if meant == DEVICES and isinstance(value, float) and 0 < value < 1:
                meant = SHARE
            also = f", or {DEVICE}=1 to name a device" if meant == DEVICES else ""
            yield (
                f"the annotation {name!r} means nothing to dask-devctx and dask, and has no effect "
                f"on the device of its tasks. Write dask.annotate({meant}={value!r}){also}"
            )
    for name in _OPTIONS & annotations.keys():
        yield f"{name} is an option of the plugin and the cluster: an annotation has no effect"
    with suppress(TypeError, ValueError):  # of a wrong value, which the worker refuses
        if (nbytes := _nbytes(given := annotations.get(MEMORY))) and nbytes < 2**20:
            yield f"the annotation {MEMORY}={given!r} reserves {nbytes} bytes: write '4 GiB'"


def about_no_plugin(name: str) -> str:
    """Return the warning about an annotation that no worker of the cluster understands."""
    return (
        f"tasks have the annotation {name!r}, and no worker of this cluster uses devices: the "
        "annotation has no effect. Register the plugin: client.register_plugin(DevicePlugin())"
    )
