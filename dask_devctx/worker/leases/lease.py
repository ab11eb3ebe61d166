"""Leases: a worker locks its devices, so that other clusters of the machine leave them.

A worker that takes devices for itself locks their UUIDs:
:mod:`dask_devctx.worker.leases.locks`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevicesInUseError
from dask_devctx.worker.leases.locks import Lock, LockDirectory, default_directory

# The choice takes well under a millisecond. A process that takes longer was stopped meanwhile.
_CHOOSING_TIMEOUT_S = 10.0


class Lease:
    """The devices that one worker uses.

    Parameters
    ----------
    devices
        The devices.
    locks
        The locks that keep other workers from these devices.
    """

    def __init__(self, devices: Sequence[Device], locks: Sequence[Lock] = ()) -> None:
        self.devices = tuple(devices)
        self._locks = tuple(locks)

    def release(self) -> None:
        """Release the devices to other workers."""
        for lock in self._locks:
            lock.release()


def acquire(
    devices: Sequence[Device],
    count: int,
    *,
    holder: str,
    directory: str | os.PathLike[str] | None = None,
) -> Lease:
    """Take devices that no other worker of this user and machine has taken.

    Parameters
    ----------
    devices
        The devices to choose from; the first free ones are taken.
    count
        The number of devices to take.
    holder
        The name of the worker that takes them, for the error in other workers.
    directory
        Where the locks are; :func:`~dask_devctx.worker.leases.locks.default_directory` by default.

    Raises
    ------
    DevicesInUseError
        Fewer devices are free. Then no device is taken.
    LockDirectoryError
        The directory cannot be trusted, or cannot be used.

    Notes
    -----
    Processes that use the same directory exclude each other. For containers, mount one directory of
    the host into all of them. Processes of different users do not exclude each other.

    The devices are free again when the lease is released or when the process has ended for any
    reason. Workers choose one at a time: if two workers want three of four devices each, one of
    them gets its three.
    """
    note = _note(holder)
    free: list[Device] = []
    locks: list[Lock] = []
    held: dict[str, str] = {}
    with LockDirectory(_path(directory)) as place:
        try:
            with place.exclusive(_CHOOSING_TIMEOUT_S):
                for device in devices:
                    if len(locks) == count:
                        break
                    lock = place.try_lock(_name(device), note)
                    if lock is None:
                        held[str(device.info)] = place.note(_name(device))
                    else:
                        free.append(device)
                        locks.append(lock)
            if len(locks) < count:
                raise DevicesInUseError(count, [str(device.info) for device in free], held)
        except BaseException:
            for lock in locks:
                lock.release()
            raise
    return Lease(free, locks)


class ProcessLocks:
    """The locks that the workers of this process hold together, each for all that use its device.

    Notes
    -----
    A process holds a device, not a worker: the workers of one process use the same CUDA contexts.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Path, str], tuple[Lock, int]] = {}

    def try_take(
        self, devices: Iterable[Device], holder: str, directory: str | os.PathLike[str] | None
    ) -> Mapping[Device, str]:
        """Take devices for this process; return those that others hold, with their holders.

        Raises
        ------
        LockDirectoryError
            The directory cannot be trusted, or cannot be used.
        """
        held: dict[Device, str] = {}
        path = _path(directory)
        with LockDirectory(path) as place, place.exclusive(_CHOOSING_TIMEOUT_S):
            for device in devices:
                known = self._held.get((path, device.uuid))
                if known is None:
                    lock = place.try_lock(_name(device), _note(holder))
                    if lock is None:
                        held[device] = place.note(_name(device))
                        continue
                    known = (lock, 0)
                self._held[path, device.uuid] = (known[0], known[1] + 1)
        return held

    def release(self, devices: Iterable[Device], directory: str | os.PathLike[str] | None) -> None:
        """Release devices; others may take those that no worker of this process uses."""
        path = _path(directory)
        for device in devices:
            lock, users = self._held.pop((path, device.uuid))
            if users > 1:
                self._held[path, device.uuid] = (lock, users - 1)
            else:
                lock.release()


process_locks = ProcessLocks()


def _path(directory: str | os.PathLike[str] | None) -> Path:
    return Path(directory) if directory else default_directory()


def _name(device: Device) -> str:
    return quote(device.uuid, safe="") + ".lock"


def _note(holder: str) -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}, {holder}"
