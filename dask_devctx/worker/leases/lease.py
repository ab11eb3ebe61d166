"""Leases: a worker locks its devices, so that other clusters of the machine leave them.

A worker that takes devices for itself locks their UUIDs:
:mod:`dask_devctx.worker.leases.locks`.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from distributed.comm import get_address_host_port

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevicesInUseError
from dask_devctx.worker.leases.locks import Kept, Lock, LockDirectory, default_directory

# The choice takes well under a millisecond. A process that takes longer was stopped meanwhile.
_CHOOSING_TIMEOUT_S = 10.0
# Holders give a sign of life at this interval. The devices of a worker that ended without releasing
# them are kept for its cluster for this time after the last sign: a nanny may start it again.
SIGN_INTERVAL_S = 5.0
_KEPT_S = 30.0
# How long a connection to a cluster's scheduler may take; it is on this machine or near it.
_CONNECTING_S = 1.0


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

    def touch(self) -> None:
        """Give a sign of life."""
        for lock in self._locks:
            lock.touch()


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
        The worker that takes them, as ``"worker NAME of SCHEDULER"``, for the error in others.
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
    reason. If it ended without a release, and its scheduler is there, they are kept for a while for
    the worker that its nanny starts again. Workers choose one at a time: if two workers want three
    of four devices each, one of them gets its three.
    """
    note, kept = _note(holder), _kept_from(holder)
    free: list[Device] = []
    locks: list[Lock] = []
    held: dict[str, str] = {}
    with LockDirectory(_path(directory)) as place:
        try:
            with place.exclusive(_CHOOSING_TIMEOUT_S):
                for device in devices:
                    if len(locks) == count:
                        break
                    lock = place.try_lock(_name(device), note, kept)
                    if lock is None:
                        held[str(device.info)] = _holder_of(place, device)
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


def holders(
    devices: Iterable[Device],
    directory: str | os.PathLike[str] | None = None,
    cluster: str = "",
) -> dict[Device, str]:
    """Return the devices that workers have for themselves now, with their holders.

    Parameters
    ----------
    devices
        The devices.
    directory
        As for :func:`acquire`.
    cluster
        The address of the scheduler whose workers may have the devices of its workers that ended;
        without one, such devices are held.

    Raises
    ------
    LockDirectoryError
        The directory cannot be trusted, or cannot be used.
    """
    kept = _kept_from(f"a cluster that starts of {cluster}")
    with LockDirectory(_path(directory)) as place, place.exclusive(_CHOOSING_TIMEOUT_S):
        return {
            device: _holder_of(place, device)
            for device in devices
            if not place.is_free(_name(device), kept)
        }


class ProcessLocks:
    """The locks that the workers of this process hold together, each for all that use its device.

    Notes
    -----
    A process holds a device, not a worker: the workers of one process use the same CUDA contexts.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Path, str], tuple[Lock, int]] = {}

    def has(self, device: Device, directory: str | os.PathLike[str] | None) -> bool:
        """Return whether workers of this process use a device."""
        return (_path(directory), device.uuid) in self._held

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
        path, kept = _path(directory), _kept_from(holder)
        taken: list[Device] = []
        with LockDirectory(path) as place, place.exclusive(_CHOOSING_TIMEOUT_S):
            try:
                for device in devices:
                    known = self._held.get((path, device.uuid))
                    if known is None:
                        lock = place.try_lock(_name(device), _note(holder), kept)
                        if lock is None:
                            held[device] = _holder_of(place, device)
                            continue
                        known = (lock, 0)
                    self._held[path, device.uuid] = (known[0], known[1] + 1)
                    taken.append(device)
            except BaseException:
                self.release(taken, directory)
                raise
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

    def touch(self) -> None:
        """Give a sign of life."""
        for lock, _ in self._held.values():
            lock.touch()


process_locks = ProcessLocks()


def _kept_from(holder: str) -> Kept:
    """Return whether a device is kept from a worker, for another cluster's worker that ended."""
    runs = functools.cache(_runs)  # several devices have the same scheduler, and a try takes time

    def kept(left: str, last_sign: float) -> bool:
        cluster = _cluster_of(left)
        young = time.time() - last_sign < _KEPT_S
        return young and cluster != _cluster_of(holder) and runs(cluster)

    return kept


def _holder_of(place: LockDirectory, device: Device) -> str:
    """Return the holder of a device, in words."""
    note = place.note(_name(device))
    return (
        f"{note}, which ended and may be starting again" if place.is_free(_name(device)) else note
    )


def _cluster_of(text: str) -> str:
    return text.rpartition(" of ")[2]


def _runs(scheduler: str) -> bool:
    """Return whether a scheduler answers at an address; one without a network has no successors."""
    try:
        socket.create_connection(get_address_host_port(scheduler), _CONNECTING_S).close()
    except (OSError, ValueError):
        return False
    return True


def _path(directory: str | os.PathLike[str] | None) -> Path:
    return Path(directory) if directory else default_directory()


def _name(device: Device) -> str:
    return quote(device.uuid, safe="") + ".lock"


def _note(holder: str) -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}, {holder}"
