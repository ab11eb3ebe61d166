"""The messages that workers send to the scheduler, and the checks of their content."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple

from dask_devctx.cuda.inventory import DeviceInfo, Inventory
from dask_devctx.errors import DeviceFailedError, DevicesInUseError, LockDirectoryError
from dask_devctx.scheduler.holdings import Holdings

# The handlers that workers call on the scheduler.
ANNOUNCE: Final = "devctx_announce"
WITHDRAW: Final = "devctx_withdraw"
REFUSE: Final = "devctx_refuse"
# A worker asks for the devices that are its own.
CLAIM: Final = "devctx_claim"
# The handler on a worker, by which the scheduler changes the worker's devices.
SHARE: Final = "devctx_share"

# More devices than any machine has, and more characters than any name of a device.
_DEVICES_LIMIT = 1024
_TEXT_LIMIT = 256
# More tasks than a worker's devices run at a time.
_TASKS_LIMIT = 10_000

# The errors with which a worker leaves that could not take its devices.
_REFUSALS: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (DevicesInUseError, LockDirectoryError)
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


def _keys(value: object, name: str) -> tuple[Hashable, ...]:
    keys = _items(value, name, _TASKS_LIMIT)
    for key in keys:
        try:
            hash(key)
        except TypeError:
            raise MalformedError(f"'{name}' has one that is no key: {_shown(key)}") from None
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
