"""Locks of devices: files in a directory that only this user can write.

An open file, not a process, holds a ``flock``. So two workers of one process exclude each other as
two processes do, and the kernel frees a lock when its file is closed, also after a crash. No
function here waits. A lock's note names its process, its worker and its cluster.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from dask_devctx import config
from dask_devctx.config import checks
from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError

_NOTE_NBYTES = 512


def take(device: Device, holder: str) -> ExitStack | None:
    """Lock a device for a holder, until what this returns is closed, as its process's end does.

    None if another holder has it, or looks just now who has it. This raises :class:`DevctxError`
    where others could write, or where the directory is a link.
    """
    with ExitStack() as lock:
        fd = _opened(device)
        lock.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        lock.callback(fcntl.flock, fd, fcntl.LOCK_UN)  # a forked child may have the file open
        note = f"pid {os.getpid()} on {socket.gethostname()}, {holder}"
        os.ftruncate(fd, 0)
        os.pwrite(fd, note.encode()[:_NOTE_NBYTES], 0)
        return lock.pop_all()


def held_devices(devices: Iterable[Device]) -> dict[Device, str]:
    """Return the devices that workers on this machine hold, with the workers."""
    held: dict[Device, str] = {}
    for device in devices:
        fd = _opened(device)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_UN)
        except BlockingIOError:
            held[device] = os.pread(fd, _NOTE_NBYTES, 0).decode(errors="replace")
        finally:
            os.close(fd)
    return held


def directory() -> Path:
    """Return the directory of this user's locks, by default ``/tmp/dask-devctx-<uid>``."""
    if given := config.get("lock-directory"):
        return Path(checks.configured(checks.path, "lock-directory", given)).expanduser()
    # It depends only on the user: processes with different directories do not exclude each other.
    # Under many batch systems, each job has its own TMPDIR. XDG_RUNTIME_DIR is set in a login
    # session but not in a service. systemd-tmpfiles does not delete locked files.
    place = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    return Path(place) / f"dask-devctx-{os.geteuid()}"


def _opened(device: Device) -> int:
    """Return the file of a device's lock, open."""
    # Any user may make a directory in /tmp: only this user's own is trusted. Files are opened
    # relative to the checked directory, and never through a symbolic link.
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    at = path = directory()
    try:
        # Only the last directory gets this mode; its parents are made as usual.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | flags)
        try:
            found, uid = os.fstat(opened), os.geteuid()
            if found.st_uid != uid:
                raise _unusable(
                    path, f"belongs to user {found.st_uid}, and {uid} runs this process"
                )
            if found.st_mode & 0o022:
                mode = f"{stat.S_IMODE(found.st_mode):04o}"
                raise _unusable(path, f"can be written by others, its mode is {mode}")
            name = quote(device.uuid, safe="") + ".lock"
            at = path / name
            return os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=opened)
        finally:
            os.close(opened)
    except OSError as error:
        why = f"cannot be opened: {error.strerror}"
        # A link gives ELOOP; in the place of a directory, it gives ENOTDIR or EEXIST.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
            why = "is a symbolic link or no directory"
        raise _unusable(at, why) from error


def _unusable(path: Path, reason: str) -> DevctxError:
    return DevctxError(
        f"devices cannot be shared out: {path} {reason}. Remove or repair it, or name another "
        "directory with the configuration devctx.lock-directory"
    )
