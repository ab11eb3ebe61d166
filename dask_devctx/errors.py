"""The exceptions that this package raises, how they keep their fields, and parts of messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, dataclass_transform

_NAMED: Final = 8  # the most suspects that a message names
_CLOSE: Final = (
    "close the cluster that holds devices and is not needed, such as that of a notebook's earlier "
    "cell (cluster.close(), or client.shutdown())"
)


def counted(n: int, noun: str) -> str:
    """Return a number and its noun, for messages: ``"1 device"``, ``"2 devices"``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(names: Sequence[str], at_most: int, comma: str = ", ") -> str:
    """Return the first of some names, and how many more there are: ``"x, y, and 3 more"``."""
    more = f"{comma}and {len(names) - at_most} more" if len(names) > at_most else ""
    return comma.join(names[:at_most]) + more


def nbytes_text(nbytes: int | None) -> str:
    """Return a number of bytes with a binary unit, such as ``"16.0 GiB"``; "?" for None."""
    if nbytes is None:
        return "?"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@dataclass_transform(eq_default=False)
class DevctxError(Exception):
    """Base class of every error that this package raises.

    Notes
    -----
    The annotations in the body of a subclass are its fields and, in this order, its parameters; a
    value after an annotation is the default. Each field becomes an attribute and an argument of
    ``Exception``, so that the error survives pickling on its way from a worker to a client.
    """

    # Not a dataclass: importing that module takes half as long as importing this package.
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._fields = tuple(dict.fromkeys((*cls._fields, *cls.__annotations__)))

    def __init__(self, *args: Any, **named: Any) -> None:
        cls = type(self)
        if names := cls._fields:
            defaults = {name: getattr(cls, name) for name in names if hasattr(cls, name)}
            given = defaults | dict(zip(names, args, strict=False)) | named
            if len(args) > len(names) or given.keys() != set(names):
                raise TypeError(f"{cls.__name__} takes {', '.join(names)}")
            args = tuple(_plain(given[name]) for name in names)
            vars(self).update(zip(names, args, strict=True))
        super().__init__(*args)

    def __repr__(self) -> str:
        # dask logs the repr of a failed task's error, and a notebook shows it. So the repr is a
        # readable message with the remedy.
        said = ". ".join([str(self), *getattr(self, "__notes__", ())])
        return f"{type(self).__name__}({said!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The error is rebuilt by a call of its class. dask rebuilds exceptions without such a call,
        # which fails for an error that is also a MemoryError.
        return type(self), self.args, vars(self)


def _plain(value: Any) -> Any:
    """Return a field's value of its own, which can be pickled."""
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, list) else value


# -- names that are mistyped

# Other projects' names for a number of GPUs; here they are no annotation and no option.
COUNTS_OF_GPUS: Final = ("gpus", "num_gpus", "n_gpus", "ngpus")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is the most like another one; "" if none is like it."""
    import difflib  # only messages need it

    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), "")


def variable(key: str) -> str:
    """Return the environment variable of a key of the section ``devctx``."""
    return f"DASK_DEVCTX__{key.upper().replace('-', '_')}"


class DriverError(DevctxError):
    """A call to the CUDA driver failed.

    Parameters
    ----------
    function
        The driver function that failed, such as ``"cuCtxSetCurrent"``.
    status, code
        The status it returned, by its name, such as ``"CUDA_ERROR_OUT_OF_MEMORY"``, and its number.
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
    """There is no CUDA driver, or this process cannot use it; made of the reason and the remedy."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(". ".join(one.rstrip(".") for one in sentences))


class DeviceNotFoundError(DevctxError, LookupError, ValueError):
    """This process does not have the device that was asked for."""


def no_device(
    requested: object, available: Sequence[str], visible_devices: str | None, hint: str
) -> DeviceNotFoundError:
    """Return the error for a device that is not there; ``available`` describes those that are."""
    have = ", ".join(available) or "none"
    seen = "not set" if visible_devices is None else repr(visible_devices)
    hint = f"{hint.rstrip('.')}. " if hint else ""
    return DeviceNotFoundError(
        f"no device {requested!r}. {hint}Available: {have}; CUDA_VISIBLE_DEVICES is {seen}"
    )


class VisibleDevicesError(DevctxError):
    """``CUDA_VISIBLE_DEVICES`` and the devices of the driver do not fit together."""


class DeviceScopeError(DevctxError):
    """A device scope ended and could not restore the context that was current before it."""


# -- a worker or cluster that cannot have devices for itself


class DevicesInUseError(DevctxError):
    """A worker, or a cluster that starts, cannot have the devices for itself that it wants.

    Others of this user hold them, or the directory of the devices' locks cannot be used.
    """


def in_use(
    who: str, wanted: int, free: Iterable[object], holders: Mapping[Any, str], *, own: bool = False
) -> DevicesInUseError:
    """Return the error of one that wants more devices (0: any) than its ``own`` or others leave."""
    names = list(map(str, free))
    wants = f"{who} wants {counted(wanted, 'device') if wanted else 'devices'} for itself"
    if wanted > (total := len(names) + len(holders)):
        return DevicesInUseError(
            f"{wants} and there {_are(total)} {total}. Lower devices_per_worker"
        )
    way = "start fewer workers, or name more devices" if own else _CLOSE
    if wanted != 1 and len(holders) > len(set(holders.values())):
        way = f"let each worker take fewer (devices_per_worker=1), {way}"
    others = f"No device is free: {way}"
    if names:
        ids = ", ".join(name.rpartition(":")[2] for name in names)
        others = (
            f"Free: {', '.join(names)}. For these, write devices=[{ids}], lower n_workers or "
            f"devices_per_worker, or leave them out. Or {way}"
        )
    return DevicesInUseError(
        f"{wants}, and {held_text(holders)}. {others}, or use the same devices: shared=True "
        "(--shared)"
    )


def held_text(holders: Mapping[Any, str]) -> str:
    """Return a text about the holders of devices, by the device; each holder is named once."""
    groups: dict[str, list[str]] = {}
    for device, who in holders.items():
        groups.setdefault(who, []).append(str(device))
    return "; ".join(
        f"{', '.join(held)} {_are(len(held))} held by {who}" for who, held in groups.items()
    )


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


# -- tasks and workers


class DeviceFailedError(DevctxError):
    """A device failed in a way that ends its process: no GPU can be used in it any more.

    Parameters
    ----------
    device, uuid
        The device where the failure was noticed. Another device of the process may have failed.
    status, code
        The driver's status, by its name, such as ``"CUDA_ERROR_ILLEGAL_ADDRESS"``, and its number.
    suspects
        The tasks that may have caused it, each as ``"key on cuda:0"``: running tasks first, then
        tasks that had ended, from the latest to the earliest. Empty if no task can be the cause.
    lost
        Whether NVML says that the device is gone.
    watched
        Whether the one suspect was watched: no other task ran in the process beside it, and the
        worker waited for its devices before it and after it.
    worker
        The worker's address; "" if it is not known.
    not_again
        Why the task that has this error does not run again, although other tasks are suspects, too.
        "" where the one suspect has it, and where all of them run again.

    Notes
    -----
    If the task itself raised an exception, that is the ``__cause__``.
    """

    device: str
    uuid: str
    status: str
    code: int
    suspects: Sequence[str] = ()
    lost: bool = False
    watched: bool = False
    worker: str = ""
    not_again: str = ""

    def __str__(self) -> str:
        was_reset = self.status == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        end = "No GPU can be used in this process any more"
        if was_reset:
            end = "Its context was reset or destroyed, and all data on it is gone"
        where = f" on {self.worker}" if self.worker else ""
        said = [f"{self.device} ({self.uuid}) failed with {self.status} ({self.code}){where}"]
        if self.lost:
            said.append("The device is gone: it fell off the bus. Reset it, or restart the machine")
        said.append(f"{end}: the worker ends, and dask computes its results again")
        # The driver gives the others for no kernel.
        look = "" if 700 <= self.code < 800 else "dmesg and nvidia-smi may say more"
        again = f"It is not run again: {self.not_again}" if self.not_again else ""
        if not self.suspects:
            said += ["No task is suspected", again or "The tasks that ran in the process run again"]
        elif len(self.suspects) > 1:
            said += [
                f"Any of these may have caused it: {listed(self.suspects, _NAMED, '; ')}",
                again
                or "All that are still needed run again, each alone and watched; then the one that "
                "breaks the device errs",
            ]
        else:
            how = "Nothing else has run since the device was last seen healthy"
            if self.watched:
                how = (
                    "It was watched: no other task ran in the process, and the worker waited for "
                    "its devices before and after it"
                )
            find = "Run its function under compute-sanitizer, which names the line of the kernel"
            if was_reset:
                find = "Take cudaDeviceReset() and numba.cuda.close() out of it"
            said += [f"{self.suspects[0]} caused it", how, again, "" if look else find]
        return ". ".join(filter(None, [*said, look]))


class DeviceOutOfMemoryError(DevctxError, MemoryError):
    """A device has no memory left for a task, even after memory was freed for another attempt.

    Parameters
    ----------
    device, uuid
        The device of the last attempt.
    requested_nbytes
        The size of the allocation that failed; None where the library does not tell it.
    free_nbytes, total_nbytes
        The device's memory after that of the failed attempt was freed; None where it is unknown.
    holders
        For each process on the device its id and the bytes that it holds; None for the bytes where
        NVML does not tell them. Empty in most containers, where no process is known.
    attempts
        How often the task ran; the last time it had the device for itself.
    limit_nbytes
        The limit of the values that dask keeps on the device; None without a limit.
    stayed_nbytes
        The bytes that could not leave the device when the task failed, by reason.
    pid
        The id of the worker's process, which may be among the holders.

    Notes
    -----
    The library's own exception is its ``__cause__``.
    """

    device: str
    uuid: str
    requested_nbytes: int | None = None
    free_nbytes: int | None = None
    total_nbytes: int | None = None
    holders: Sequence[tuple[int, int | None]] = ()
    attempts: int = 1
    limit_nbytes: int | None = None
    stayed_nbytes: Mapping[str, int] = MappingProxyType({})
    pid: int | None = None

    def __str__(self) -> str:
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        facts = "; ".join(self._facts())
        # The last of several attempts has the device for itself.
        fewer = "run fewer tasks there at a time (tasks_per_device, if it is above 1), "
        fewer = fewer if self.attempts == 1 else ""
        remedy = f"Make the task's parts smaller or its inputs fewer, {fewer}or keep less there"
        if self.requested_nbytes and self.requested_nbytes > (self.total_nbytes or math.inf):
            remedy = "The task asks for more than the device has: make the task's parts smaller"
        return (
            f"{self.device} ({self.uuid}) has not enough memory; the task ran {times}"
            f"{f' ({facts})' if facts else ''}. {remedy}"
        )

    def _facts(self) -> Iterator[str]:
        if self.requested_nbytes:
            yield f"{nbytes_text(self.requested_nbytes)} more asked for"
        if self.free_nbytes is not None and self.total_nbytes is not None:
            free, total = nbytes_text(self.free_nbytes), nbytes_text(self.total_nbytes)
            yield f"once it ended, {free} of {total} are free"
        if held := [(pid, nbytes) for pid, nbytes in self.holders if nbytes != 0]:
            unknown = "an unknown amount"
            who = {p: "this worker" if p == self.pid else f"process {p}" for p, _ in held}
            sizes = (f"{who[p]} {unknown if n is None else nbytes_text(n)}" for p, n in held)
            yield f"held by {', '.join(sizes)}"
        if self.limit_nbytes:
            yield f"the limit of values that dask keeps there is {nbytes_text(self.limit_nbytes)}"
        if stayed := [f"{nbytes_text(n)} {why}" for why, n in self.stayed_nbytes.items()]:
            yield f"not moved to host memory when it failed: {', '.join(stayed)}"
