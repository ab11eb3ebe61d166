"""The messages between workers and the scheduler, and the checks of their content."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from dask_devctx.cuda.naming import DeviceInfo, Inventory
from dask_devctx.errors import (
    DeviceFailedError,
    DevicesInUseError,
    LockDirectoryError,
    WorkerSetupError,
)
from dask_devctx.scheduler.cluster import WorkerDevices
from dask_devctx.scheduler.rows import KINDS, Row

# The handlers that workers call on the scheduler.
ANNOUNCE: Final = "devctx_announce"
WITHDRAW: Final = "devctx_withdraw"
REFUSE: Final = "devctx_refuse"
# A worker says which parts of its devices actors keep, and asks which of its tasks others may run.
KEEP: Final = "devctx_keep"
# A worker asks for the devices that are its own.
CLAIM: Final = "devctx_claim"
# The handler on a worker, by which the scheduler changes the worker's devices.
SHARE: Final = "devctx_share"
# The message that a worker answers with its history.
HISTORY: Final = "devctx_history"
# The most rows of one kind in one answer, so that neither event loop is held for long.
ANSWER_LIMIT: Final = 5_000

# More entries than any machine has devices or than its devices run tasks at a time.
_ENTRIES = 10_000
_DEVICES = 1024

_TEXT_LIMIT: Final = 256
Text = Annotated[str, "a text of 1 to 256 characters"]
Count = Annotated[int, "a number from 0 to 2**63"]
Share = Annotated[float, "a share from 0 to 1"]


class MalformedError(ValueError):
    """A worker's message has wrong content; the text names the mistake."""


class Sender(NamedTuple):
    """The address of the worker that sends a message."""

    address: Text


class _Device(NamedTuple):
    device_id: Count
    uuid: Text
    pci_bus_id: Text | None = None


class _Announcement(NamedTuple):
    seen: list[Any]
    used: list[Text]
    limits: dict[Text, Count] | None = None
    memory_limit: Count | None = None


class Claim(NamedTuple):
    """The name of a worker's process, and the UUIDs of the devices that it may use."""

    process: Text
    candidates: list[Text]


class Division(NamedTuple):
    """The UUIDs of a worker's devices as the scheduler says, and the version of that."""

    uuids: list[Text]
    version: Count


class KeptByActors(NamedTuple):
    """The parts of a worker's devices that actors leave, and the tasks that wait for their end.

    ``place`` is the share of a task that says nothing; ``left`` has the share and the bytes, None
    for unlimited, by UUID of the devices with an actor.
    """

    unannotated: Literal["assign", "leave"]
    place: Share
    left: dict[Text, tuple[Share, Count | None]]
    keys: list[Hashable]


class DeviceName(NamedTuple):
    """A device of a worker: its UUID, its ordinal there and its name."""

    uuid: str
    device_id: int
    name: str | None


class HistoryAnswer(NamedTuple):
    """A worker's answer about its history: ``rows`` and the number of ``lost`` ones by ring.

    ``epoch`` and ``next`` belong into the next question.
    """

    epoch: Text
    next: dict[str, Count]
    lost: dict[str, Count]
    devices: list[Any]
    rows: dict[str, Any]


class Failure(NamedTuple):
    """A failure of a worker's devices: the fields of its :class:`~dask_devctx.DeviceFailedError`.

    ``suspects`` may have caused it, ``bystanders`` run again too, and ``erred`` err with it.
    """

    fields: list[Any]
    suspects: list[Hashable]
    bystanders: list[Hashable]
    erred: list[Hashable]


class _Refusal(NamedTuple):
    kind: Text
    arguments: list[Any]


# The errors with which a worker leaves that could not take its devices.
_REFUSALS: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (DevicesInUseError, LockDirectoryError, WorkerSetupError)
}
_FAILED = tuple[Text, Text, Text, int, list[str], bool, bool, bool, str]

Kind = TypeVar("Kind", bound="tuple[Any, ...]")


@functools.cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def read(kind: type[Kind], message: object) -> Kind:
    """Return a message's content; further fields are ignored: workers may have another version."""
    if not isinstance(message, Mapping):
        raise MalformedError(f"it is no mapping, but {type(message).__name__}")
    make: Any = kind
    hints = _hints_of(kind)
    lacking = hints.keys() - message.keys() - make._field_defaults.keys()
    if lacking:
        raise MalformedError(f"it lacks {sorted(lacking)}")
    given = {n: _checked(message[n], hint, n) for n, hint in hints.items() if n in message}
    found: Kind = make(**given)
    return found


def read_devices(message: Mapping[str, Any]) -> tuple[WorkerDevices, int | None]:
    """Return a worker's devices and its limit of host memory from its announcement."""
    said = read(_Announcement, message)
    if len(said.seen) > _DEVICES:
        raise MalformedError(f"'seen' has {len(said.seen)} entries; {_DEVICES} at most")
    devices = [read(_Device, one) for one in said.seen]
    if [one.device_id for one in devices] != list(range(len(devices))):
        raise MalformedError("'seen' is not in the order of 'device_id'")
    uuids, used = {one.uuid for one in devices}, frozenset(said.used)
    if len(uuids) < len(devices):
        raise MalformedError("'seen' has a UUID twice")
    if not used <= uuids:
        raise MalformedError(f"'used' has UUIDs that 'seen' lacks: {sorted(used - uuids)[:3]}")
    limits = said.limits or {}
    if not limits.keys() <= used:
        raise MalformedError("'limits' has a UUID that 'used' lacks")
    if said.memory_limit == 0:
        raise MalformedError("'memory_limit' is 0")
    seen = tuple(
        DeviceInfo(n, one.uuid, pci_bus_id=one.pci_bus_id) for n, one in enumerate(devices)
    )
    return WorkerDevices(Inventory(seen), used, limits), said.memory_limit


def read_refusal(message: Mapping[str, Any]) -> Exception:
    """Return the error with which a worker leaves; it is made here, and nothing is unpickled."""
    kind, arguments = read(_Refusal, message)
    if kind not in _REFUSALS:
        raise MalformedError(f"'kind' is none of {sorted(_REFUSALS)}: {kind!r}")
    try:
        error = _REFUSALS[kind](*arguments)
        str(error)
    except Exception as wrong:
        raise MalformedError(f"'arguments' are not those of {kind}: {wrong!r}") from None
    return error


def read_history(answer: object) -> tuple[HistoryAnswer, dict[str, list[Row]]]:
    """Return a worker's answer about its history, and its rows."""
    said = read(HistoryAnswer, answer)
    if not said.next.keys() & said.lost.keys() >= KINDS.keys():
        raise MalformedError("'next' or 'lost' lacks a ring")
    devices = _rows(said.devices, "devices", DeviceName)
    return said._replace(devices=devices), {
        name: _rows(said.rows.get(name), name, kind) for name, kind in KINDS.items()
    }


def read_failure(message: Mapping[str, Any]) -> Failure:
    """Return the failure that a worker reports."""
    said = read(Failure, message)
    try:
        fields = DeviceFailedError(*said.fields).args
    except Exception as wrong:
        raise MalformedError(f"'fields' are not those of a failure: {wrong!r:.80}") from None
    return said._replace(fields=_checked(fields, _FAILED, "fields"))


def _rows(value: object, name: str, kind: Any) -> list[Any]:
    """Return rows of one kind; each may lack its last fields, and may have more."""
    found, hints = [], list(_hints_of(kind).values())
    for row in _checked(value, list[Any], name):
        if not isinstance(row, list | tuple):
            raise MalformedError(f"a row of '{name}' is no list, but {type(row).__name__}")
        fields = [_checked(one, hint, name) for one, hint in zip(row, hints, strict=False)]
        try:
            found.append(kind(*fields))
        except TypeError:
            raise MalformedError(f"a row of '{name}' lacks fields") from None
    return found


def _checked(value: Any, hint: Any, name: str) -> Any:
    """Return a value if it has a type; over the network, a tuple is a list or a tuple."""
    kind, of = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        hint = NoneType if value is None else next(one for one in of if one is not NoneType)
        return _checked(value, hint, name)
    if kind in (list, tuple):
        if not isinstance(value, list | tuple) or len(value) > _ENTRIES:
            raise MalformedError(f"'{name}' is no list of {_ENTRIES} at most: {_shown(value)}")
        if kind is list:
            return list(value) if of == (Any,) else [_checked(one, of[0], name) for one in value]
        if len(value) != len(of):
            raise MalformedError(f"'{name}' has {len(value)} entries in place of {len(of)}")
        return tuple(_checked(one, type_, name) for one, type_ in zip(value, of, strict=True))
    if kind is dict:
        if not isinstance(value, Mapping):
            raise MalformedError(f"'{name}' is no mapping, but {type(value).__name__}")
        return {_checked(k, of[0], name): _checked(v, of[1], name) for k, v in value.items()}
    if kind is Literal:
        fits = isinstance(value, str) and value in of
    else:
        fits = _FITS[hint](value) if hint in _FITS else isinstance(value, hint)
    if not fits:
        raise MalformedError(f"'{name}' has a wrong value: {_shown(value)}")
    return value


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


_FITS: Final[Mapping[Any, Callable[[Any], bool]]] = {
    Any: lambda one: True,
    Hashable: _has_hash,
    Text: lambda one: isinstance(one, str) and 0 < len(one) <= _TEXT_LIMIT,
    Count: lambda one: one.__class__ is int and 0 <= one < 2**63,
    Share: lambda one: one.__class__ in (int, float) and 0 <= one <= 1,
    float: lambda one: isinstance(one, float | int),
}


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}" if isinstance(value, str | int | float) else type(value).__name__
    except Exception:
        return type(value).__name__
