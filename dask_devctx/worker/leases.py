"""The division of a machine's devices among its workers, without a coordinator.

A worker that takes devices for itself locks their UUIDs; see :mod:`dask_devctx.worker.locks`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from dask_devctx.cuda.device import Device, named_devices
from dask_devctx.errors import DeviceNotFoundError, DevicesInUseError
from dask_devctx.worker.locks import Lock, LockDirectory, default_directory

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


@contextmanager
def leased_to_worker(
    wanted: Sequence[object] | None,
    count: int | None,
    *,
    holder: str,
    directory: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[Device, ...]]:
    """While it is open, a worker has its devices.

    Parameters
    ----------
    wanted
        Its devices, each anything that :class:`~dask_devctx.Device` accepts; None for all that the
        process sees.
    count
        How many of them it takes for itself; None for all, shared with other workers.
    holder, directory
        As for :func:`acquire`.

    Yields
    ------
    tuple of Device
        The devices.

    Raises
    ------
    DeviceNotFoundError
        There is no device, or a named one is missing.
    DevicesInUseError, LockDirectoryError
        As :func:`acquire` raises them.
    """
    found = named_devices(wanted)
    if not found:
        raise DeviceNotFoundError(
            "any",
            (),
            None,
            "The worker sees no GPU: check CUDA_VISIBLE_DEVICES and the option devices",
        )
    if count is None:
        yield found
        return
    lease = acquire(found, count, holder=holder, directory=directory)
    try:
        yield lease.devices
    finally:
        lease.release()


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
        Where the locks are; :func:`~dask_devctx.worker.locks.default_directory` by default.

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
    note = f"pid {os.getpid()} on {socket.gethostname()}, {holder}"
    free: list[Device] = []
    locks: list[Lock] = []
    held: dict[str, str] = {}
    with LockDirectory(Path(directory) if directory else default_directory()) as place:
        try:
            with place.exclusive(_CHOOSING_TIMEOUT_S):
                for device in devices:
                    if len(locks) == count:
                        break
                    name = quote(device.uuid, safe="") + ".lock"
                    lock = place.try_lock(name, note)
                    if lock is None:
                        held[str(device.info)] = place.note(name)
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
