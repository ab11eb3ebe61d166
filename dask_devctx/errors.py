"""The exceptions that this package raises.

Every error keeps what it reports as attributes and hands all of them to
``super().__init__``, so that it survives pickling on its way from a worker to a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class DevctxError(Exception):
    """Base class of every error that this package raises."""

    def __repr__(self) -> str:
        # dask logs a failed task's error by its repr, and a notebook shows it so: let that be what
        # a person can read, with what to do about it.
        said = ". ".join([str(self), *getattr(self, "__notes__", ())])
        return f"{type(self).__name__}({said!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Made again from its arguments: what rebuilds an exception without calling its class, as
        # dask does, fails for one that is a MemoryError as well.
        return type(self), self.args, self.__dict__


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

    def __init__(self, function: str, status: str, code: int, description: str = "") -> None:
        super().__init__(function, status, code, description)
        self.function = function
        self.status = status
        self.code = code
        self.description = description

    def __str__(self) -> str:
        detail = f": {self.description}" if self.description else ""
        return f"{self.function} failed with {self.status} ({self.code}){detail}"


class DeviceMemoryError(DriverError, MemoryError):
    """The device has no memory left for what was asked; its context is healthy."""


class DriverUnavailableError(DevctxError):
    """There is no CUDA driver to talk to, or none that this process may talk to.

    Parameters
    ----------
    reason
        What is missing.
    remedy
        What to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason.rstrip('.')}. {self.remedy}"


class ForkedProcessError(DriverUnavailableError):
    """CUDA was initialised before this process was forked, so it cannot be used here."""


class DeviceNotFoundError(DevctxError, LookupError):
    """A device was asked for that this process does not have.

    Parameters
    ----------
    requested
        What was asked for, as it was given.
    available
        A description of each device that there is, in CUDA's order.
    visible_devices
        The value of ``CUDA_VISIBLE_DEVICES``, or None where it is not set.
    hint
        What to do about it, or "".
    """

    def __init__(
        self,
        requested: object,
        available: Sequence[str] = (),
        visible_devices: str | None = None,
        hint: str = "",
    ) -> None:
        # The request may be any object, of a class that the other end does not have.
        requested = requested if type(requested) in (int, str) else repr(requested)
        available = tuple(available)
        super().__init__(requested, available, visible_devices, hint)
        self.requested = requested
        self.available = available
        self.visible_devices = visible_devices
        self.hint = hint

    def __str__(self) -> str:
        have = ", ".join(self.available) or "none"
        seen = "not set" if self.visible_devices is None else repr(self.visible_devices)
        hint = f". {self.hint}" if self.hint else ""
        return (
            f"no device {self.requested!r}; available: {have}; CUDA_VISIBLE_DEVICES is {seen}{hint}"
        )


class VisibleDevicesError(DevctxError):
    """What ``CUDA_VISIBLE_DEVICES`` shows and what the driver has do not fit together.

    Parameters
    ----------
    value
        The value of ``CUDA_VISIBLE_DEVICES``, or None where it is not set.
    reason
        What does not fit, and what to do about it.
    """

    def __init__(self, value: str | None, reason: str) -> None:
        super().__init__(value, reason)
        self.value = value
        self.reason = reason

    def __str__(self) -> str:
        seen = "not set" if self.value is None else repr(self.value)
        return f"CUDA_VISIBLE_DEVICES is {seen}: {self.reason}"


class DeviceScopeError(DevctxError):
    """A device scope was left in a way that cannot restore what was before it.

    Parameters
    ----------
    scope
        The device or context whose scope it is.
    reason
        What happened, and what to do about it.
    """

    def __init__(self, scope: object, reason: str) -> None:
        scope = scope if isinstance(scope, str) else repr(scope)
        super().__init__(scope, reason)
        self.scope = scope
        self.reason = reason

    def __str__(self) -> str:
        return f"the scope of {self.scope} {self.reason}"


class DeviceMismatchError(DevctxError, ValueError):
    """A value was used on a device that it does not live on.

    Parameters
    ----------
    value
        What it is.
    device
        Where it lives.
    current
        Where it was used.
    """

    def __init__(self, value: object, device: object, current: object) -> None:
        value, device, current = str(value), str(device), str(current)
        super().__init__(value, device, current)
        self.value = value
        self.device = device
        self.current = current

    def __str__(self) -> str:
        return (
            f"{self.value} lives on {self.device} and cannot be used on {self.current}. Take it "
            f"there with to_device(value, {self.current!r}), or compute where it is, inside "
            f"'with Device({self.device!r}):'"
        )


class LockDirectoryError(DevctxError):
    """The directory of the device locks cannot be trusted, or cannot be used.

    Parameters
    ----------
    path
        The directory, or the file in it.
    reason
        What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"devices cannot be shared out: {self.path} {self.reason}. Remove or repair it, or "
            "name another directory with the configuration devctx.lock-directory"
        )


class DevicesInUseError(DevctxError):
    """A worker wants more devices for itself than are free.

    Parameters
    ----------
    wanted
        How many it wants.
    free
        A description of each device that is free.
    holders
        Who holds each of the others, by the device's description.
    """

    def __init__(self, wanted: int, free: Sequence[str], holders: Mapping[str, str]) -> None:
        free = tuple(free)
        holders = dict(holders)
        super().__init__(wanted, free, holders)
        self.wanted = wanted
        self.free = free
        self.holders = holders

    def __str__(self) -> str:
        total = len(self.free) + len(self.holders)
        held = "; ".join(f"{device} is held by {who}" for device, who in self.holders.items())
        return (
            f"this worker wants {self.wanted} devices for itself and {len(self.free)} of {total} "
            f"are free{': ' if held else ''}{held}. Close a cluster that holds them and is not "
            "needed, such as that of a notebook's earlier cell (cluster.close()), start fewer "
            "workers on this machine, or lower devices_per_worker"
        )


_NAMED = 8  # so many suspects are named in the message


class DeviceFailedError(DevctxError):
    """A device failed in a way that ends its process: no GPU can be used in it any more.

    Parameters
    ----------
    device
        Where it was noticed. Another device of the same process may be the one that failed.
    uuid
        Its UUID.
    status
        The name of the driver's status, such as ``"CUDA_ERROR_ILLEGAL_ADDRESS"``.
    code
        The number of that status.
    suspects
        The tasks that may have caused it, each as ``"key on cuda:0"``: the one that noticed it
        first, then the others, the latest first.
    synchronized
        Whether each task was waited for, so that a task that was done before is no suspect.
    lost
        Whether NVML says that the device is not there any more.
    watched
        Whether the suspects had been suspects of an earlier failure, and were waited for this time.
        Other tasks that ran at the same time are not named then.

    Notes
    -----
    The exception that the task itself raised, if it did, is its ``__cause__``.
    """

    def __init__(
        self,
        device: str,
        uuid: str,
        status: str,
        code: int,
        suspects: Sequence[str] = (),
        synchronized: bool = False,
        lost: bool = False,
        watched: bool = False,
    ) -> None:
        suspects = tuple(suspects)
        super().__init__(device, uuid, status, code, suspects, synchronized, lost, watched)
        self.device = device
        self.uuid = uuid
        self.status = status
        self.code = code
        self.suspects = suspects
        self.synchronized = synchronized
        self.lost = lost
        self.watched = watched

    def __str__(self) -> str:
        lost = (
            ". The device is not there any more: it fell off the bus; reset it or restart the "
            "machine (dmesg says why)"
            if self.lost
            else ""
        )
        what = (
            f"{self.device} ({self.uuid}) failed with {self.status} ({self.code}){lost}. No GPU "
            "can be used in this process any more: the worker ends, and what it held is "
            "recomputed. "
        )
        if self.watched and len(self.suspects) == 1:
            return (
                f"{what}It was found by being watched: {self.suspects[0]} had been a suspect of an "
                "earlier failure, was run again alone among its suspects, and its device was "
                "waited for. compute-sanitizer finds the line"
            )
        if len(self.suspects) == 1:
            return f"{what}Nothing else had been at work since it was last seen healthy: " + (
                f"{self.suspects[0]} caused it. compute-sanitizer finds the line"
            )
        named = "; ".join(self.suspects[:_NAMED])
        if len(self.suspects) > _NAMED:
            named += f"; and {len(self.suspects) - _NAMED} more (.suspects has all)"
        how = (
            "They had been suspects of an earlier failure, were watched, and ran at the same time. "
            "To tell them apart, run them one after the other"
            if self.watched
            else "They ran at the same time. To tell them apart, run them one after the other"
            if self.synchronized
            else "Work that a task leaves running may fail after it. To find out, run again with "
            "DevicePlugin(synchronize=True) (devctx.synchronize: true), which waits for the device "
            "after each task"
        )
        return f"{what}Any of these may have caused it: {named}. {how}"


class DeviceOutOfMemoryError(DevctxError, MemoryError):
    """A device has no memory left for a task, also after room was made and it was tried again.

    Parameters
    ----------
    device, uuid
        The device where it was tried last.
    requested_nbytes
        How much the allocation that failed asked for; None where the library did not say.
    free_nbytes, total_nbytes
        What the device had afterwards, when the failed attempt's own memory was given back; None
        where nobody says.
    holders
        Pairs of a process' id and the bytes that it holds there, None where NVML does not say; not
        known at all in most containers.
    replicas_nbytes
        What was freed of copies that this process had kept of other devices' values.
    attempts
        How often the task was run.

    Notes
    -----
    The library's own exception is its ``__cause__``.
    """

    def __init__(
        self,
        device: str,
        uuid: str,
        requested_nbytes: int | None = None,
        free_nbytes: int | None = None,
        total_nbytes: int | None = None,
        holders: Sequence[tuple[int, int | None]] = (),
        replicas_nbytes: int = 0,
        attempts: int = 1,
    ) -> None:
        holders = tuple(holders)
        super().__init__(
            device,
            uuid,
            requested_nbytes,
            free_nbytes,
            total_nbytes,
            holders,
            replicas_nbytes,
            attempts,
        )
        self.device = device
        self.uuid = uuid
        self.requested_nbytes = requested_nbytes
        self.free_nbytes = free_nbytes
        self.total_nbytes = total_nbytes
        self.holders = holders
        self.replicas_nbytes = replicas_nbytes
        self.attempts = attempts

    def __str__(self) -> str:
        asked = f"{_gib(self.requested_nbytes)} asked for" if self.requested_nbytes else ""
        free = (
            f"{_gib(self.free_nbytes)} of {_gib(self.total_nbytes)} free now, after room was made"
            if self.free_nbytes is not None and self.total_nbytes is not None
            else ""
        )
        held = ", ".join(
            f"process {pid} {'an unknown amount' if nbytes is None else _gib(nbytes)}"
            for pid, nbytes in self.holders
        )
        facts = "; ".join(
            filter(
                None,
                [
                    asked,
                    free,
                    f"held by {held}" if held else "",
                    f"{_gib(self.replicas_nbytes)} of copies were dropped"
                    if self.replicas_nbytes
                    else "",
                ],
            )
        )
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        return (
            f"{self.device} ({self.uuid}) has not enough memory; the task was tried {times}"
            f"{f' ({facts})' if facts else ''}. Make the task's parts smaller, run fewer tasks per "
            "device, or keep fewer results on it"
        )


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"
