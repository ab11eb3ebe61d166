"""The exceptions of the driver, of devices, who has them, scopes and values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from dask_devctx.errors.base import DevctxError, counted, nbytes_text

# A UUID's first digits name a device, too.
_REST_OF_A_UUID: Final = re.compile(
    r"(?<=[GM][PI][UG]-[0-9a-f]{8})(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)


class DriverError(DevctxError):
    """A call to the CUDA driver failed.

    Parameters
    ----------
    function
        The driver function that failed, such as ``"cuCtxSetCurrent"``.
    status
        The name of the status it returned, such as ``"CUDA_ERROR_OUT_OF_MEMORY"``.
    code
        The number of that status.
    description
        The driver's own description of the status, or "".
    """

    function: str
    status: str
    code: int
    description: str = ""

    def __str__(self) -> str:
        detail = f": {self.description}" if self.description else ""
        return f"{self.function} failed with {self.status} ({self.code}){detail}"


class DeviceMemoryError(DriverError, MemoryError):
    """The device has too little memory left for the request; its context is healthy.

    Parameters
    ----------
    nbytes
        The bytes that were asked for; None where it is unknown.
    """

    nbytes: int | None = None

    def __str__(self) -> str:
        asked = "" if self.nbytes is None else f" ({nbytes_text(self.nbytes)} asked for)"
        return f"{super().__str__()}{asked}"


class DriverUnavailableError(DevctxError):
    """There is no CUDA driver, or this process cannot use it.

    Parameters
    ----------
    reason
        What is missing.
    remedy
        What to do about it.
    """

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason.rstrip('.')}. {self.remedy}"


class DeviceNotFoundError(DevctxError, LookupError):
    """This process does not have the device that was asked for.

    Parameters
    ----------
    requested
        The request, as it was given.
    available
        A description of each available device, in CUDA's order.
    visible_devices
        The value of ``CUDA_VISIBLE_DEVICES``, or None where it is not set.
    hint
        What to do about it, or "".
    """

    requested: object
    available: Sequence[str] = ()
    visible_devices: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        short = [_REST_OF_A_UUID.sub("", one) for one in self.available]
        have = ", ".join(short if len({*short}) == len(short) else self.available) or "none"
        seen = "not set" if self.visible_devices is None else repr(self.visible_devices)
        hint = f"{self.hint.rstrip('.')}. " if self.hint else ""
        return (
            f"no device {self.requested!r}. {hint}Available: {have}; CUDA_VISIBLE_DEVICES is {seen}"
        )


class VisibleDevicesError(DevctxError):
    """``CUDA_VISIBLE_DEVICES`` and the devices of the driver do not fit together.

    Parameters
    ----------
    value
        The value of ``CUDA_VISIBLE_DEVICES``, or None where it is not set.
    reason
        The conflict, and its remedy.
    """

    value: str | None
    reason: str

    def __str__(self) -> str:
        seen = "not set" if self.value is None else repr(self.value)
        return f"CUDA_VISIBLE_DEVICES is {seen}: {self.reason}"


class DeviceScopeError(DevctxError):
    """A device scope ended and could not restore the context that was current before it.

    Parameters
    ----------
    scope
        The device or context whose scope it is.
    reason
        The cause, and its remedy.
    """

    scope: object
    reason: str

    def __str__(self) -> str:
        return f"the scope of {self.scope} {self.reason}"


class DeviceMismatchError(DevctxError, ValueError):
    """A value was used on a device that it does not live on.

    Parameters
    ----------
    value
        A description of the value.
    device
        The device where it lives.
    current
        The device where it was used.
    """

    value: str
    device: str
    current: str

    def __str__(self) -> str:
        return (
            f"{self.value} lives on {self.device} and cannot be used on {self.current}. Copy it "
            f"there with to_device(value, {self.current!r}), or use it on its own device, inside "
            f"'with Device({self.device!r}):'"
        )


class ValueNotMovableError(DevctxError, TypeError):
    """A value holds arrays of another device, and cannot be rebuilt around copies of them.

    Parameters
    ----------
    kind
        The type of the value.
    device
        The device to which the value was to be moved.
    reason
        The reason why it cannot be rebuilt.
    """

    kind: str
    device: str
    reason: str

    def __str__(self) -> str:
        return (
            f"a {self.kind} that holds arrays of another device cannot be taken to {self.device}: "
            f"{self.reason}. Register functions that do it, with device_of.register({self.kind}) "
            f"and to_device.register({self.kind}), or run the task on the device where it lives"
        )


# -- a worker or cluster that cannot have devices for itself

# The note of a worker in its lock.
_HOLDER: Final = re.compile(
    r"pid (?P<pid>\d+) on (?P<host>\S+), worker (?P<worker>.+) of (?P<cluster>[^,]+)"
)


class LockDirectoryError(DevctxError):
    """The directory of the device locks is unsafe, or cannot be used.

    Parameters
    ----------
    path
        The directory, or the file in it.
    reason
        What is wrong with it.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return (
            f"devices cannot be shared out: {self.path} {self.reason}. Remove or repair it, or "
            "name another directory with the configuration devctx.lock-directory"
        )


class DevicesInUseError(DevctxError):
    """A worker, or a cluster that starts, wants more devices for itself than are free.

    Parameters
    ----------
    wanted
        How many devices it wants; 0 for any number of those that are free.
    free
        A description of each free device.
    holders
        The holder of each other device, by the device's description.
    by_cluster
        Whether a cluster on this machine wants them, before it starts its workers.
    """

    wanted: int
    free: Sequence[str]
    holders: Mapping[str, str]
    by_cluster: bool = False

    def __str__(self) -> str:
        free, total = [_name(device) for device in self.free], len(self.free) + len(self.holders)
        who = "this cluster" if self.by_cluster else "this worker"
        wants = f"{who} wants {counted(self.wanted, 'device') if self.wanted else 'devices'}"
        if self.wanted > total:
            return f"{wants} for itself and there {_are(total)} {total}. Lower devices_per_worker"
        others = "No device is free. Close"
        if free:
            ids = ", ".join(name.rpartition(":")[2] for name in free)
            others = (
                f"Free: {', '.join(free)}. For these, write devices=[{ids}], lower n_workers or "
                "devices_per_worker, or leave them out. Or close"
            )
        held = held_text({_name(device): holder for device, holder in self.holders.items()})
        return (
            f"{wants} for itself, and {held}. {others} the cluster that holds devices and is not "
            f"needed, such as that of a notebook's earlier cell (cluster.close(), or "
            "client.shutdown()), or use the same devices: shared=True"
        )


def _name(device: str) -> str:
    return device.partition(" ")[0]


def held_text(holders: Mapping[str, str]) -> str:
    """Return a text about the holders of devices, by the device; each cluster is named once."""
    groups: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for device, who in holders.items():
        found = _HOLDER.fullmatch(who)
        group: tuple[str, ...] = (found["cluster"], found["host"]) if found else (who,)
        worker, pid = (found["worker"], found["pid"]) if found else ("", "")
        groups.setdefault(group, []).append((device, worker, pid))
    texts = []
    # Clusters first, then holders that are no workers.
    for group in sorted(groups, key=len, reverse=True):
        devices, workers, pids = (
            list(dict.fromkeys(each)) for each in zip(*groups[group], strict=True)
        )
        who = group[0]
        if len(group) > 1:
            who = f"{_named('worker', workers)} of {who} ({_named('pid', pids)} on {group[1]})"
        texts.append(f"{', '.join(devices)} {_are(len(devices))} held by {who}")
    return "; ".join(texts)


def _named(noun: str, names: Sequence[str]) -> str:
    return f"{noun if len(names) == 1 else noun + 's'} {', '.join(names)}"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"
