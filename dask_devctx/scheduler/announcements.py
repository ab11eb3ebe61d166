"""The messages between workers and the scheduler, and the checks of their content."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

from dask_devctx.cuda.inventory import DeviceInfo, Inventory
from dask_devctx.errors import (
    DeviceFailedError,
    DevicesInUseError,
    LockDirectoryError,
    WorkerSetupError,
)
from dask_devctx.scheduler.holdings import Holdings
from dask_devctx.scheduler.kept import Left
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

# More devices than any machine has, and more characters than any name of a device.
_DEVICES_LIMIT = 1024
_TEXT_LIMIT = 256
# More tasks than a worker's devices run at a time.
_TASKS_LIMIT = 10_000

# The errors with which a worker leaves that could not take its devices.
_REFUSALS: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (DevicesInUseError, LockDirectoryError, WorkerSetupError)
}


# The type of each field of the rows of each kind.
_ROW_FIELDS: Final = {
    kind: tuple(
        float | int if hint is float else float | int | None if hint == float | None else hint
        for hint in get_type_hints(kind).values()
    )
    for kind in KINDS.values()
}


class MalformedError(ValueError):
    """A worker's message has wrong content; the text names the mistake."""


def read_address(message: Mapping[str, Any]) -> str:
    """Return the worker's address as the message gives it."""
    return _text(message.get("address"), "address")


def read_holdings(message: Mapping[str, Any]) -> Holdings:
    """Return a worker's devices from its announcement.

    Notes
    -----
    Unknown fields of a device are ignored, because workers may have another version.
    """
    seen = _items(message.get("seen"), "seen")
    devices = tuple(_device(ordinal, fields) for ordinal, fields in enumerate(seen))
    uuids = {info.uuid for info in devices}
    if len(uuids) < len(devices):
        raise MalformedError("'seen' has a UUID twice")
    used = frozenset(_text(uuid, "used") for uuid in _items(message.get("used"), "used"))
    if not used <= uuids:
        raise MalformedError(f"'used' has UUIDs that 'seen' lacks: {sorted(used - uuids)[:3]}")
    return Holdings(Inventory(devices), used, _limits(message.get("limits", {}), used))


def read_memory_limit(message: Mapping[str, Any]) -> int | None:
    """Return the worker's limit of host memory in bytes; None where the message has none."""
    limit = message.get("memory_limit")
    if limit is not None and (limit.__class__ is not int or not 0 < limit < 2**63):
        raise MalformedError(f"'memory_limit' is no number of bytes: {_shown(limit)}")
    return limit


def read_claim(message: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the name of a worker's process, and the UUIDs of the devices that it may use."""
    candidates = _items(message.get("candidates"), "candidates")
    return (
        _text(message.get("process"), "process"),
        [_text(uuid, "candidates") for uuid in candidates],
    )


def read_share(message: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the UUIDs of a worker's devices as the scheduler says, and the version of that."""
    version = message.get("version")
    if version.__class__ is not int or not 0 <= version < 2**63:
        raise MalformedError(f"'version' is no number of a version: {_shown(version)}")
    uuids = _items(message.get("uuids"), "uuids")
    return [_text(uuid, "uuids") for uuid in uuids], version


def read_kept(message: Mapping[str, Any]) -> tuple[Left, tuple[Hashable, ...]]:
    """Return what actors leave of a worker's devices, and the tasks that wait for their end."""
    rule, place = message.get("unannotated"), message.get("place")
    if rule not in ("assign", "leave"):
        raise MalformedError(f"'unannotated' is no rule: {_shown(rule)}")
    devices = {}
    for uuid, left in _mapping(message.get("left"), "left").items():
        share, nbytes = (*_items(left, "left", 2), None, None)[:2]
        limit = None if nbytes is None else _number(nbytes, "left")
        devices[_text(uuid, "left")] = _share(share, "left"), limit
    return Left(rule, _share(place, "place"), devices), _keys(message.get("keys"), "keys")


def read_refusal(message: Mapping[str, Any]) -> Exception:
    """Return the error with which a worker leaves.

    Notes
    -----
    The message is plain data, and the error is made here: no message is unpickled.
    """
    kind = _text(message.get("kind"), "kind")
    if kind not in _REFUSALS:
        raise MalformedError(f"'kind' is none of {sorted(_REFUSALS)}: {kind!r}")
    arguments = _items(message.get("arguments"), "arguments")
    try:
        error = _REFUSALS[kind](*arguments)
        str(error)
    except Exception as wrong:
        raise MalformedError(f"'arguments' are not those of {kind}: {wrong!r}") from None
    return error


class DeviceName(NamedTuple):
    """A device of a worker: its UUID, its ordinal there and its name."""

    uuid: str
    device_id: int
    name: str | None


class HistoryAnswer(NamedTuple):
    """A worker's answer about its history.

    Parameters
    ----------
    epoch, next
        The numbers for the next question.
    devices
        The worker's devices.
    rows
        The rows, by the name of their ring.
    lost
        How many rows were dropped before they were asked for.
    """

    epoch: str
    next: dict[str, int]
    devices: list[DeviceName]
    rows: dict[str, list[Row]]
    lost: int


def read_history(answer: object) -> HistoryAnswer:
    """Return a worker's answer about its history.

    Notes
    -----
    Further fields of a row are ignored, because workers may have another version.
    """
    if not isinstance(answer, Mapping):
        raise MalformedError(f"it is no mapping, but {type(answer).__name__}")
    following, lost, rows = (_mapping(answer.get(name), name) for name in ("next", "lost", "rows"))
    found: dict[str, list[Row]] = {
        name: _rows(rows.get(name), name, kind, _ROW_FIELDS[kind]) for name, kind in KINDS.items()
    }
    return HistoryAnswer(
        _text(answer.get("epoch"), "epoch"),
        {name: _number(following.get(name), "next") for name in KINDS},
        _rows(answer.get("devices"), "devices", DeviceName, (str, int, str | None)),
        found,
        sum(_number(lost.get(name), "lost") for name in KINDS if name != "samples"),
    )


class FailureMessage(NamedTuple):
    """The content of a worker's message about a failure of its devices.

    Parameters
    ----------
    fields
        The fields of its :class:`~dask_devctx.DeviceFailedError`.
    suspects
        The tasks that may have caused it.
    bystanders
        Other tasks that run again.
    erred
        The tasks among them that err with it.
    """

    fields: tuple[Any, ...]
    suspects: tuple[Hashable, ...]
    bystanders: tuple[Hashable, ...]
    erred: tuple[Hashable, ...]


def read_failure(message: Mapping[str, Any]) -> FailureMessage:
    """Return the failure that a worker reports."""
    given = _items(message.get("fields"), "fields")
    try:
        error = DeviceFailedError(*given)
        texts = (error.device, error.uuid, error.status)
        flags = (error.synchronized, error.lost, error.watched)
    except Exception as wrong:
        raise MalformedError(f"'fields' are not those of a failure: {wrong!r:.80}") from None
    for text in texts:
        _text(text, "fields")
    if not isinstance(error.not_again, str) or any(not isinstance(flag, bool) for flag in flags):
        raise MalformedError("'fields' are not those of a failure")
    if error.code.__class__ is not int or any(not isinstance(one, str) for one in error.suspects):
        raise MalformedError("'fields' are not those of a failure")
    keys = (_keys(message.get(name), name) for name in ("suspects", "bystanders", "erred"))
    return FailureMessage(error.args, *keys)


def _rows(value: object, name: str, kind: Callable[..., Any], types: Sequence[Any]) -> list[Any]:
    """Return rows of one kind; each may lack its last fields, and may have more."""
    found = []
    for row in _items(value, name, ANSWER_LIMIT):
        if not isinstance(row, list | tuple):
            raise MalformedError(f"a row of '{name}' is no list, but {type(row).__name__}")
        for field, type_ in zip(row, types, strict=False):
            if type_ is Hashable:
                _hashed(field, name)
            elif not isinstance(field, type_):
                raise MalformedError(f"'{name}' has a field of wrong type: {_shown(field)}")
        try:
            found.append(kind(*row[: len(types)]))
        except TypeError:
            raise MalformedError(f"a row of '{name}' lacks fields") from None
    return found


def _mapping(value: object, name: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise MalformedError(f"'{name}' is no mapping, but {type(value).__name__}")
    return value


def _number(value: object, name: str) -> int:
    if value.__class__ is not int or not 0 <= value < 2**63:
        raise MalformedError(f"'{name}' has one that is no number: {_shown(value)}")
    return value


def _share(value: object, name: str) -> float:
    if value.__class__ not in (int, float) or not 0 <= value <= 1:
        raise MalformedError(f"'{name}' has a share that is no number from 0 to 1: {_shown(value)}")
    return float(value)


def _hashed(key: object, name: str) -> None:
    try:
        hash(key)
    except TypeError:
        raise MalformedError(f"'{name}' has one that is no key: {_shown(key)}") from None


def _keys(value: object, name: str) -> tuple[Hashable, ...]:
    keys = _items(value, name, _TASKS_LIMIT)
    for key in keys:
        _hashed(key, name)
    return tuple(keys)


def _device(ordinal: int, fields: object) -> DeviceInfo:
    if not isinstance(fields, Mapping):
        raise MalformedError(f"a device in 'seen' is no mapping, but {type(fields).__name__}")
    given = fields.get("device_id")
    if given.__class__ is not int or given != ordinal:
        raise MalformedError(f"device {ordinal} in 'seen' has the 'device_id' {_shown(given)}")
    pci_bus_id = fields.get("pci_bus_id")
    if pci_bus_id is not None:
        pci_bus_id = _text(pci_bus_id, "pci_bus_id")
    return DeviceInfo(ordinal, _text(fields.get("uuid"), "uuid"), pci_bus_id=pci_bus_id)


def _limits(limits: object, used: frozenset[str]) -> dict[str, int]:
    if not isinstance(limits, Mapping):
        raise MalformedError(f"'limits' is no mapping, but {type(limits).__name__}")
    found = {}
    for uuid, nbytes in limits.items():
        if uuid not in used:
            raise MalformedError(f"'limits' has a UUID that 'used' lacks: {_shown(uuid)}")
        if nbytes.__class__ is not int or nbytes < 0:
            raise MalformedError(f"a limit in 'limits' is no number of bytes: {_shown(nbytes)}")
        found[str(uuid)] = nbytes
    return found


def _items(value: object, name: str, most: int = _DEVICES_LIMIT) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise MalformedError(f"'{name}' is no list, but {type(value).__name__}")
    if len(value) > most:
        raise MalformedError(f"'{name}' has {len(value)} entries; {most} at most")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _TEXT_LIMIT:
        raise MalformedError(
            f"'{name}' is no text of 1 to {_TEXT_LIMIT} characters: {_shown(value)}"
        )
    return value


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}" if isinstance(value, str | int | float) else type(value).__name__
    except Exception:
        return type(value).__name__
