"""Leases: a worker locks its devices, so that other clusters of the machine leave them.

A lock's note names its worker and its cluster. All of this may wait for other processes: call it
on a thread, not on an event loop.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

from distributed.comm import get_address_host_port

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevicesInUseError
from dask_devctx.worker.leases.locks import Lock, choosing, default_directory

# The choice takes well under a millisecond. A process that takes longer was stopped meanwhile, or
# asks whether the scheduler of a worker that ended is there.
_CHOOSING_TIMEOUT_S = 10.0
# Holders give a sign of life at this interval. The devices of a worker that ended without releasing
# them are kept for its cluster for this time after the last sign: a nanny may start it again.
SIGN_INTERVAL_S = 5.0
_KEPT_S = 30.0
# How long a connection to a cluster's scheduler may take; it is on this machine or near it.
_CONNECTING_S = 1.0

# The locks that workers of this process hold together: they use the same CUDA contexts.
_of_process: dict[tuple[Path, str], Lock] = {}
_changing = threading.Lock()


class Lease:
    """The devices that one worker has for itself, or with the other workers of its process.

    The holder is text such as ``"worker NAME of SCHEDULER"``.
    """

    def __init__(
        self, holder: str, directory: str | os.PathLike[str] | None = None, *, alone: bool = False
    ) -> None:
        self._holder, self._path, self._alone = holder, _path(directory), alone
        self._locks: dict[Device, Lock] = {}
        self._is_released = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that it has, in the order in which they were taken."""
        return tuple(self._locks)

    def take(
        self,
        devices: Iterable[Device],
        count: int | None = None,
        timeout_s: float = _CHOOSING_TIMEOUT_S,
    ) -> dict[Device, str]:
        """Take devices, or the first ``count`` that are free; return the holders of the others.

        It raises :class:`DevicesInUseError` and takes none where fewer than ``count`` are free.
        """
        held: dict[Device, str] = {}
        taken: list[Device] = []
        available = functools.partial(_available, _cluster_of(self._holder), functools.cache(_runs))
        with choosing(self._path, timeout_s) as opened:
            try:
                for device in devices:
                    if len(taken) == count:
                        break
                    if not self._joins(device):
                        lock = available(opened, device)
                        if isinstance(lock, str):
                            held[device] = lock
                            continue
                        self._hold(device, lock)
                    taken.append(device)
                if count is not None and len(taken) < count:
                    texts = {str(device.info): who for device, who in held.items()}
                    raise DevicesInUseError(count, [str(one.info) for one in taken], texts)
            except BaseException:
                self.give_up(taken)
                raise
        if self._is_released:  # meanwhile, by another thread
            self.give_up(self.devices)
        return held

    def give_up(self, devices: Iterable[Device]) -> None:
        """Release devices; others may take those that no worker of this process uses."""
        for device in list(devices):
            with _changing:
                lock = self._locks.pop(device)
                lock.users -= 1
                if not lock.users:
                    _of_process.pop((self._path, device.uuid), None)
                    lock.release()

    def release(self) -> None:
        """Release all devices for good."""
        self._is_released = True
        self.give_up(self.devices)

    def touch(self) -> None:
        """Give a sign of life."""
        for lock in list(self._locks.values()):
            lock.touch()

    def _joins(self, device: Device) -> bool:
        """Share the lock that another worker of this process has; return whether there is one."""
        with _changing:
            lock = None if self._alone else _of_process.get((self._path, device.uuid))
            if lock is not None:
                lock.users += 1
                self._locks[device] = lock
        return lock is not None

    def _hold(self, device: Device, lock: Lock) -> None:
        lock.claim(f"pid {os.getpid()} on {socket.gethostname()}, {self._holder}")
        self._locks[device] = lock
        if not self._alone:
            _of_process[self._path, device.uuid] = lock


def holders(
    devices: Iterable[Device],
    directory: str | os.PathLike[str] | None = None,
    cluster: str = "",
    *,
    in_process: bool = False,
) -> dict[Device, str]:
    """Return the devices that a new worker of a cluster could not have, with their holders.

    A worker in this process could have those that others in this process share.
    """
    path, runs = _path(directory), functools.cache(_runs)
    held: dict[Device, str] = {}
    with choosing(path, _CHOOSING_TIMEOUT_S) as opened:
        for device in devices:
            if in_process and (path, device.uuid) in _of_process:
                continue
            lock = _available(cluster, runs, opened, device)
            if isinstance(lock, str):
                held[device] = lock
            else:
                lock.close()
    return held


def _available(
    cluster: str, runs: Callable[[str], bool], opened: Callable[[str], Lock], device: Device
) -> Lock | str:
    """Return the lock of a device that a worker of a cluster can have, or the device's holder."""
    lock = opened(quote(device.uuid, safe="") + ".lock")
    note, is_young = lock.note, time.time() - lock.last_sign < _KEPT_S
    others = _cluster_of(note)
    if not lock.is_held:
        answer = note or "another process"
    # A note of one that ended: the nanny may start it again. A `runs` may take a second.
    elif note and is_young and others != cluster and runs(others):
        answer = f"{note}, which ended and may be starting again"
    else:
        return lock
    lock.close()
    return answer


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
