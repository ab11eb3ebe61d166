"""The exceptions of tasks and workers: what they cannot have, how their devices fail, packages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from dask_devctx.errors.base import DevctxError, nbytes_text

# The tests ran with these releases of dask and distributed, the oldest and the newest.
TESTED_DASK: Final = ("2025.4.0", "2026.8.0")
_NAMED: Final = 8  # the most suspects that a message names


class NotEnoughDevicesError(DevctxError, LookupError):
    """A task asks for more devices at once than its worker has.

    Parameters
    ----------
    wanted
        How many devices it asks for.
    devices
        A description of each device of the worker.
    named
        A description of each device that it names; empty if it asks for any.
    on_machine
        How many devices the worker's machine has; None where it is unknown.
    """

    wanted: int
    devices: Sequence[str] = ()
    named: Sequence[str] = ()
    on_machine: int | None = None

    def __str__(self) -> str:
        have = ", ".join(self.devices) or "none"
        asked = f" ({', '.join(self.named)})" if self.named else ""
        lacking = "all of them" if self.named else "so many"
        failed = (
            f"the task asks for {self.wanted} devices at once{asked}, and no worker that it may "
            f"run on has {lacking}: this one has {len(self.devices)} ({have})"
        )
        if self.on_machine is not None and self.wanted > self.on_machine:
            return (
                f"{failed}, and its machine has {self.on_machine}. Ask for at most "
                f'{self.on_machine}, or for all devices of a worker with devices="all"'
            )
        enough = f", or workers that have enough with devices_per_worker={self.wanted}"
        enough = "" if self.named else enough
        return (
            f"{failed}. The devices of a task belong to one worker. Start one worker for all "
            f"devices of a machine with LocalDeviceCluster(n_workers=1){enough}"
        )


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

    def __str__(self) -> str:
        was_reset = self.status == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        lost = " The device is gone: it fell off the bus. Reset it, or restart the machine"
        end = "No GPU can be used in this process any more"
        if was_reset:
            end = "Its context was reset or destroyed, and all data on it is gone"
        return (
            f"{self.device} ({self.uuid}) failed with {self.status} ({self.code})."
            f"{f'{lost} (dmesg tells why).' if self.lost else ''} {end}: the worker ends, and dask "
            f"computes its results again. {self._cause(was_reset)}"
        )

    def _cause(self, was_reset: bool) -> str:
        again = f"It is not run again: {self.not_again}" if self.not_again else ""
        if not self.suspects:
            again = again or "The tasks that ran in the process run again"
            return f"No task is suspected. {again}"
        if len(self.suspects) > 1:
            named = "; ".join(self.suspects[:_NAMED])
            if len(self.suspects) > _NAMED:
                named += f"; and {len(self.suspects) - _NAMED} more (.suspects has all)"
            again = again or (
                "All that are still needed run again, each alone and watched; then the one that "
                "breaks the device errs"
            )
            return f"Any of these may have caused it: {named}. {again}"
        how = "Nothing else has run since the device was last seen healthy"
        if self.watched:
            how = (
                "It was watched: no other task ran in the process, and the worker waited for its "
                "devices before and after it"
            )
        find = "Run its function under compute-sanitizer, which names the line of the kernel"
        if was_reset:
            find = "Take cudaDeviceReset() and numba.cuda.close() out of it"
        return ". ".join(filter(None, [f"{self.suspects[0]} caused it", how, again, find]))


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

    def __str__(self) -> str:
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        facts = "; ".join(self._facts())
        return (
            f"{self.device} ({self.uuid}) has not enough memory; the task ran {times}"
            f"{f' ({facts})' if facts else ''}. {self._remedy()}"
        )

    def _facts(self) -> list[str]:
        facts = []
        if self.requested_nbytes:
            facts.append(f"{nbytes_text(self.requested_nbytes)} asked for")
        if self.free_nbytes is not None and self.total_nbytes is not None:
            free, total = nbytes_text(self.free_nbytes), nbytes_text(self.total_nbytes)
            facts.append(f"{free} of {total} are free after the task gave its memory back")
        held = [
            f"process {pid} {'an unknown amount' if nbytes is None else nbytes_text(nbytes)}"
            for pid, nbytes in self.holders
            if nbytes != 0
        ]
        if held:
            facts.append(f"held by {', '.join(held)}")
        if self.replicas_nbytes:
            facts.append(f"{nbytes_text(self.replicas_nbytes)} of copies were dropped")
        if self.limit_nbytes:
            limit = nbytes_text(self.limit_nbytes)
            facts.append(f"the limit of values that dask keeps there is {limit}")
        stayed = [f"{nbytes_text(nbytes)} {why}" for why, nbytes in self.stayed_nbytes.items()]
        if stayed:
            facts.append(f"not moved to host memory: {', '.join(stayed)}")
        return facts

    def _remedy(self) -> str:
        if self.requested_nbytes and self.requested_nbytes > (self.total_nbytes or math.inf):
            return "The task asks for more than the device has: make the task's parts smaller"
        fewer = "run fewer tasks there at a time (tasks_per_device, if it is above 1), "
        # The last of several attempts has the device for itself.
        fewer = fewer if self.attempts == 1 else ""
        return f"Make the task's parts smaller, {fewer}or keep fewer results there"


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

    def __str__(self) -> str:
        return (
            f"the worker {self.worker} cannot use its devices, and leaves the cluster: "
            f"{self.reason}. The worker's log has the traceback"
        )


class UnsupportedDaskError(DevctxError):
    """The installed dask or distributed lacks a name that this package uses.

    Parameters
    ----------
    name
        The missing name, with its module.
    dask, distributed, dask_devctx
        The versions that are installed.

    Notes
    -----
    It is raised before anything changes.
    """

    name: str
    dask: str
    distributed: str
    dask_devctx: str

    def __str__(self) -> str:
        oldest, newest = TESTED_DASK
        return (
            f"dask-devctx {self.dask_devctx} uses {self.name}, which is not in dask {self.dask} "
            f"and distributed {self.distributed}. Nothing was changed. Install a newer "
            "dask-devctx, or a dask and distributed that this one was tested with: "
            f"{oldest} to {newest}"
        )
