"""Leases: a worker locks its devices, so that no other process of this user takes them.

A lock's note names its worker and its cluster. All of this may wait for other processes: call it
on a thread, not on an event loop.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevicesInUseError, LockDirectoryError
from dask_devctx.worker.leases.locks import Lock, choosing, default_directory

# The choice takes well under a millisecond. A process that takes longer was stopped meanwhile.
_CHOOSING_TIMEOUT_S = 10.0
# A cluster waits so long for one that starts just now.
_STARTING_TIMEOUT_S = 30.0


class Lease:
    """The devices that one worker has for itself; its holder is ``"worker NAME of SCHEDULER"``."""

    def __init__(self, holder: str, directory: str | os.PathLike[str] | None = None) -> None:
        self._holder, self._path = holder, _path(directory)
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
        taken: dict[Device, Lock] = {}
        with choosing(self._path, timeout_s) as opened, ExitStack() as taking:
            for device in devices:
                if len(taken) == count:
                    break
                lock = _lock(opened, device)
                if not lock.is_held:
                    held[device] = lock.note
                    lock.close()
                    continue
                taking.callback(lock.close)
                lock.claim(f"pid {os.getpid()} on {socket.gethostname()}, {self._holder}")
                taken[device] = lock
            if count is not None and len(taken) < count:
                raise in_use(count, taken, held)
            taking.pop_all()
            self._locks |= taken
        if self._is_released:  # meanwhile, by another thread
            self.give_up(self.devices)
        return held

    def give_up(self, devices: Iterable[Device]) -> None:
        """Release devices; others may take them."""
        for device in list(devices):
            if lock := self._locks.pop(device, None):
                lock.close()

    def release(self) -> None:
        """Release all devices for good."""
        self._is_released = True
        self.give_up(self.devices)


def holders(
    devices: Iterable[Device], directory: str | os.PathLike[str] | None = None
) -> dict[Device, str]:
    """Return the devices that others hold, with their holders."""
    held: dict[Device, str] = {}
    with choosing(_path(directory), _CHOOSING_TIMEOUT_S) as opened:
        for device in devices:
            lock = _lock(opened, device)
            if not lock.is_held:
                held[device] = lock.note
            lock.close()
    return held


@contextmanager
def starting(directory: str | os.PathLike[str] | None = None) -> Iterator[Callable[[], None]]:
    """Let this user's clusters start one after another; gives a function that ends the start.

    Each then sees which devices are held. Of two that start at once, each would get some devices,
    and both would fail.
    """
    with ExitStack() as alone:
        # A process that a cluster starts would wait for that cluster.
        if multiprocessing.parent_process() is None:
            with suppress(LockDirectoryError):  # the other one takes long, or it is raised later
                path = _path(directory)
                alone.enter_context(choosing(path, _STARTING_TIMEOUT_S, "starting.lock"))
        yield alone.close


def in_use(wanted: int, free: Iterable[Device], held: Mapping[Device, str]) -> DevicesInUseError:
    """Return the error of a worker that wants more devices than are free."""
    texts = {str(device.info): who for device, who in held.items()}
    return DevicesInUseError(wanted, [str(device.info) for device in free], texts)


def _lock(opened: Callable[[str], Lock], device: Device) -> Lock:
    return opened(quote(device.uuid, safe="") + ".lock")


def _path(directory: str | os.PathLike[str] | None) -> Path:
    return Path(directory) if directory else default_directory()
