"""The options of the plugin: one field for each, checked in one place.

A new option is a field of :class:`Options` with its paragraph, a key in ``devctx.yaml`` and in
``devctx-schema.yaml``, and a row in ``docs/configuration.md``. The plugin, the cluster and the
command line take it from here.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

from dask.typing import no_default
from dask.utils import parse_bytes

from dask_devctx import config

# A device's tasks run on the device's own threads. So a worker's `nthreads` only limits how many
# tasks dask sends it ahead. If it is small, threads wait for the scheduler; if it is large, results
# pile up before they are used.
LOOK_AHEAD: Final = 8

# A smaller limit in bytes is a mistake, such as 8 for "8 GiB" or 80 for 0.8.
_LEAST_LIMIT_NBYTES: Final = 1024

# The paragraphs of all options replace this line in a class's docstring.
_PLACE: Final = "{options}"

# A function of an option's name and value that returns the value to keep, or raises.
_Check = Callable[[str, Any], object]


def _whole_number(least: int) -> _Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _refused(name, f"a whole number, {least} or more", value)
        return value

    return check


def _one_of(*choices: object) -> _Check:
    def check(name: str, value: Any) -> object:
        # 1 and 0 equal True and False, but are refused
        if not any(type(value) is type(one) and value == one for one in choices):
            raise _refused(name, " or ".join(map(repr, choices)), value)
        return value

    return check


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise _refused(name, "a fraction of a device's memory between 0 and 1", value)
    return float(value)


def _share_of_memory(name: str, value: Any) -> float:
    found = value
    if isinstance(value, str):
        with suppress(ValueError):
            found = parse_bytes(value)
    if isinstance(found, (bool, str)) or not isinstance(found, (int, float)) or found < 0:
        raise _refused(name, "a fraction of a device's memory, or bytes such as '2 GiB'", value)
    return found


def _memory_limit(name: str, value: Any) -> float | str | None:
    found = value
    if isinstance(value, str):
        if value in ("auto", "default"):  # the second is dask-cuda's word
            return "auto"
        with suppress(ValueError):
            found = float(value) if value.replace(".", "", 1).isdigit() else parse_bytes(value)
    if isinstance(found, (bool, str)) or not isinstance(found, (int, float, type(None))):
        found = -1
    if found is None or found == 0:
        return None
    if found < 0 or 1 < found < _LEAST_LIMIT_NBYTES or found != found:
        raise _refused(
            name,
            "'auto', a fraction of a device's memory up to 1, bytes such as '12 GiB' "
            f"({_LEAST_LIMIT_NBYTES} or more), or 0 or None for no limit",
            value,
        )
    return float(found) if found <= 1 else int(found)


def _devices(name: str, value: Any) -> tuple[object, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} is a list, got {value!r}. Write devices=[0, 1] or devices=['GPU-8f3a'], in "
            "the environment DASK_DEVCTX__DEVICES='[0, 1]' or "
            """DASK_DEVCTX__DEVICES='["GPU-8f3a"]'"""
        )
    devices = tuple(value)
    if not devices:
        raise ValueError(f"{name} is empty. Leave it out for all devices that the worker sees")
    return devices


def _function(name: str, value: Any) -> object:
    if not callable(value):
        raise TypeError(f"{name} is a function of the candidates that returns one, got {value!r}")
    return value


def _refused(name: str, expected: str, value: object) -> ValueError:
    return ValueError(
        f"{name} must be {expected}, got {value!r} (in the configuration devctx.{_key(name)})"
    )


def _key(name: str) -> str:
    return name.replace("_", "-")


def _option(check: _Check, *, configured: bool = True, default: object = None) -> Any:
    """Return an optional field; if ``configured``, its default is the configuration's value."""
    return field(default=default, metadata={"check": check, "configured": configured})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the plugin, checked; the defaults come from the configuration.

    Parameters
    ----------
    devices
        The devices that a worker uses, each anything that :class:`~dask_devctx.Device` accepts;
        all that it sees by default.
    devices_per_worker
        How many of them each worker takes for itself alone. With this option, no two workers of one
        machine and user take the same device. None: a worker uses all, together with others.
    tasks_per_device
        How many tasks run on a device at a time. Tasks that wait for each other must all have a
        place: see docs/deployment.md.
    unannotated
        ``"assign"`` gives a task without a ``device`` annotation a device; ``"leave"`` leaves it on
        dask's own threads without one.
    move_inputs
        Whether a task's inputs that live on another device are copied to its own before it runs.
    replica_limit
        How much of each device's memory such copies may take, as a fraction.
    policy
        Chooses the device of a task that names none, given one :class:`~dask_devctx.Candidate` per
        device: see docs/placement.md. By default the task goes where it starts soonest.
    synchronize
        Wait for the device before a task counts as done, so that a failure names the one task that
        caused it.
    oom_retries
        How often a task that ran out of a device's memory is tried again, after memory was freed.
    ipc
        Whether values go to other workers of the machine by CUDA IPC. ``"auto"``: if it works and
        the connection is not as good; True: whenever it works; False: never.
    ipc_staging
        How much of each device's memory values may take while they are sent: a fraction up to 1,
        or bytes such as ``"2 GiB"``.
    device_memory_limit
        How much of each device's memory the values that dask keeps may take: ``"auto"`` for 0.8 of
        it, a fraction, bytes such as ``"12 GiB"``, 0 or None for no limit. Beyond it, values go to
        host memory, and come back before their tasks: see docs/memory.md.

    Raises
    ------
    TypeError
        ``devices`` is not a sequence, or ``policy`` not a function.
    ValueError
        An option, or the configuration that stands in for it, is out of range.
    """

    devices: Sequence[object] | None = _option(_devices)
    devices_per_worker: int | None = _option(_whole_number(1))
    tasks_per_device: int = _option(_whole_number(1))
    unannotated: Literal["assign", "leave"] = _option(_one_of("assign", "leave"))
    move_inputs: bool = _option(_one_of(True, False))
    replica_limit: float = _option(_fraction)
    policy: Callable[[Sequence[Any]], Any] | None = _option(  # noqa: RUF009 - makes a field
        _function, configured=False
    )
    synchronize: bool = _option(_one_of(True, False))
    oom_retries: int = _option(_whole_number(0))
    ipc: Literal["auto"] | bool = _option(_one_of("auto", True, False))
    ipc_staging: float = _option(_share_of_memory)
    # None means that there is no limit, so the value for "not given" is another one.
    device_memory_limit: float | str | None = _option(_memory_limit, default=no_default)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, default = getattr(self, one.name), None
            if one.metadata["configured"]:
                if value is one.default:
                    value = config.get(_key(one.name))
                default = config.defaults["devctx"][_key(one.name)]
            if value is not None or default is not None:
                value = one.metadata["check"](one.name, value)
            object.__setattr__(self, one.name, value)


OPTION_NAMES: Final = tuple(one.name for one in fields(Options))
# The keys of the configuration that stand in for options.
CONFIGURED: Final = tuple(_key(one.name) for one in fields(Options) if one.metadata["configured"])


def remembered_tasks() -> int:
    """Return how many tasks a worker remembers, by the configuration of its own process.

    Raises
    ------
    ValueError
        It is not a whole number.
    """
    count: Any = _whole_number(0)("history", config.get("history"))
    return int(count)


def refuse_unknown(given: Iterable[str], known: Collection[str], owner: str) -> None:
    """Refuse unknown keyword arguments.

    Parameters
    ----------
    given
        Their names.
    known
        All known names.
    owner
        The name of the class that got the arguments.

    Raises
    ------
    TypeError
        A name is unknown; the message has the nearest known one.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"Did you mean {near[0]}?" if near else f"help({owner}) lists all options"
            raise TypeError(f"{owner} has no option {name!r}. {meant}")


# -- constructors that take them as keyword arguments

P = ParamSpec("P")
Init = TypeVar("Init", bound=Callable[..., None])


def takes_only(
    options: Callable[P, Options],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorate a constructor whose keyword arguments are the options, for help and editors."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        _sign(init, others=False)
        return init

    return decorate


def takes_also(init: Init) -> Init:
    """Decorate a constructor that takes the options and other keyword arguments."""
    _sign(init, others=True)
    return init


def _sign(init: Any, *, others: bool) -> None:
    signature = inspect.signature(init)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    taken = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=str(one.type).removesuffix(" | None") + " | None",
        )
        for one in fields(Options)
    ]
    parameters = itertools.chain(own, taken, rest if others else ())
    init.__signature__ = signature.replace(parameters=list(parameters))


Class = TypeVar("Class", bound=type)


def documents_options(cls: Class) -> Class:
    """Decorate a class whose docstring lists the options, each with its own paragraph."""
    if cls.__doc__ and Options.__doc__:  # python -OO leaves none
        text = inspect.cleandoc(Options.__doc__).split("----------\n", 1)[1].split("\n\nRaises")[0]
        cls.__doc__ = cls.__doc__.replace(_PLACE, text.replace("\n", "\n    "))
    return cls
