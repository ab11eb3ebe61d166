"""The exceptions of workers: one is not set up, its devices fail, or a task has no memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dask_devctx.errors.base import DevctxError, as_texts, nbytes_text


class WorkerSetupError(DevctxError):
    """A worker of a :class:`~dask_devctx.LocalDeviceCluster` cannot use its devices, and left.

    Parameters
    ----------
    worker
        The name of the worker.
    reason
        The class and the text of the error in the worker, whose log has its traceback.
    """

    worker: str
    reason: str

    _convert = staticmethod(as_texts)

    def __str__(self) -> str:
        return (
            f"the worker {self.worker} cannot use its devices, and leaves the cluster: "
            f"{self.reason}. The worker's log has the traceback"
        )


_NAMED = 8  # the most suspects that the message names
# A context and the libraries on it take at most so much of a device; more is values.
_CONTEXT_PART = 0.05


class DeviceFailedError(DevctxError):
    """A device failed in a way that ends its process: no GPU can be used in it any more.

    Parameters
    ----------
    device
        The device where the failure was noticed. Another device of the process may have failed.
    uuid
        Its UUID.
    status
        The name of the driver's status, such as ``"CUDA_ERROR_ILLEGAL_ADDRESS"``.
    code
        The number of that status.
    suspects
        The tasks that may have caused it, each as ``"key on cuda:0"``: running tasks first, then
        tasks that had ended, from the latest to the earliest. Empty if no task can be the cause.
    synchronized
        Whether the worker waited for the device after each task, so that no finished task is a
        suspect.
    lost
        Whether NVML says that the device is gone.
    watched
        Whether the one suspect was watched: no other task ran in the process beside it, and the
        worker waited for its devices before it and after it.
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
    synchronized: bool = False
    lost: bool = False
    watched: bool = False
    not_again: str = ""

    @staticmethod
    def _convert(fields: dict[str, Any]) -> None:
        fields["suspects"] = tuple(fields["suspects"])

    def __str__(self) -> str:
        lost = (
            ". The device is gone: it fell off the bus. Reset it, or restart the machine (dmesg "
            "tells why)"
            if self.lost
            else ""
        )
        end = (
            "Its context was reset or destroyed, and all data on it is gone"
            if self._was_reset
            else "No GPU can be used in this process any more"
        )
        return (
            f"{self.device} ({self.uuid}) failed with {self.status} ({self.code}){lost}. {end}: "
            f"the worker ends, and dask computes its results again. {self._cause()}"
        )

    @property
    def _was_reset(self) -> bool:
        return self.status == "CUDA_ERROR_CONTEXT_IS_DESTROYED"

    def _cause(self) -> str:
        again = (
            f"It is not run again: {self.not_again}"
            if self.not_again
            else "All that are still needed run again, each alone and watched; then the one that "
            "breaks the device errs"
        )
        if not self.suspects:
            again = again if self.not_again else "The tasks that ran in the process run again"
            return f"No task is suspected. {again}"
        if len(self.suspects) > 1:
            named = "; ".join(self.suspects[:_NAMED])
            if len(self.suspects) > _NAMED:
                named += f"; and {len(self.suspects) - _NAMED} more (.suspects has all)"
            return f"Any of these may have caused it: {named}. {again}"
        suspect = self.suspects[0]
        find = (
            "Take cudaDeviceReset() and numba.cuda.close() out of it"
            if self._was_reset
            else "Run its function under compute-sanitizer, which names the line of the kernel"
        )
        how = (
            "It was watched: no other task ran in the process, and the worker waited for its "
            "devices before and after it"
            if self.watched
            else "Nothing else has run since the device was last seen healthy"
        )
        return f"{suspect} caused it. {how}. {again + '. ' if self.not_again else ''}{find}"


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
    replicas_nbytes
        The bytes of copies of other devices' values that were dropped to make room.
    attempts
        How often the task ran; the last time it had the device for itself.
    limit_nbytes
        The limit of the values that dask keeps on the device; None without a limit.
    stayed_nbytes
        The bytes that could not leave the device when the task failed, by reason.

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
    replicas_nbytes: int = 0
    attempts: int = 1
    limit_nbytes: int | None = None
    stayed_nbytes: Mapping[str, int] = MappingProxyType({})

    @staticmethod
    def _convert(fields: dict[str, Any]) -> None:
        fields["holders"] = tuple(fields["holders"])
        fields["stayed_nbytes"] = dict(fields["stayed_nbytes"])

    def __str__(self) -> str:
        asked = f"{nbytes_text(self.requested_nbytes)} asked for" if self.requested_nbytes else ""
        free = (
            f"{nbytes_text(self.free_nbytes)} of {nbytes_text(self.total_nbytes)} are free after "
            "the task gave its memory back"
            if self.free_nbytes is not None and self.total_nbytes is not None
            else ""
        )
        held = ", ".join(
            f"process {pid} {'an unknown amount' if nbytes is None else nbytes_text(nbytes)}"
            for pid, nbytes in self.holders
            if nbytes != 0
        )
        stayed = ", ".join(
            f"{nbytes_text(nbytes)} {why}" for why, nbytes in self.stayed_nbytes.items()
        )
        facts = "; ".join(
            filter(
                None,
                [
                    asked,
                    free,
                    f"held by {held}" if held else "",
                    f"{nbytes_text(self.replicas_nbytes)} of copies were dropped"
                    if self.replicas_nbytes
                    else "",
                    f"the limit of values that dask keeps there is {nbytes_text(self.limit_nbytes)}"
                    if self.limit_nbytes
                    else "",
                    f"not moved to host memory: {stayed}" if stayed else "",
                ],
            )
        )
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        return (
            f"{self.device} ({self.uuid}) has not enough memory; the task ran {times}"
            f"{f' ({facts})' if facts else ''}. {self._remedy()}"
        )

    def _remedy(self) -> str:
        if self.requested_nbytes and self.requested_nbytes > (self.total_nbytes or math.inf):
            return "The task asks for more than the device has: make the task's parts smaller"
        remedies = ["make the task's parts smaller"]
        if self.attempts == 1:  # the last of several attempts has the device for itself
            remedies.append("run fewer tasks there at a time (tasks_per_device, if it is above 1)")
        if self._keeps_results:
            remedies.append("keep fewer results there")
        *others, last = remedies
        text = f"{', '.join(others)}, or {last}" if others else last
        return text[0].upper() + text[1:]

    @property
    def _keeps_results(self) -> bool:
        """Whether so much of the device is taken that results may be part of it."""
        if self.stayed_nbytes or self.free_nbytes is None or self.total_nbytes is None:
            return True
        return self.total_nbytes - self.free_nbytes > _CONTEXT_PART * self.total_nbytes
