"""Locks that end with their process: files in a directory that only this user can write.

An open file, not a process, holds a ``flock``. So two workers of one process exclude each other as
two processes do, and the kernel frees a lock when its file is closed, also after a crash. No
function here waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import weakref
from pathlib import Path

from dask_devctx.errors import LockDirectoryError

_NOTE_NBYTES = 512


def default_directory() -> Path:
    """Return the directory of this user's locks, ``/tmp/dask-devctx-<uid>``."""
    # It depends only on the user: processes with different directories do not exclude each other.
    # Under many batch systems, each job has its own TMPDIR. XDG_RUNTIME_DIR is set in a login
    # session but not in a service. systemd-tmpfiles does not delete locked files.
    place = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    return Path(place) / f"dask-devctx-{os.geteuid()}"


class Lock:
    """A lock that is held until it is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _open_locks.add(self)

    def close(self) -> None:
        """Free the lock, as the end of its process does; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the file open
            os.close(fd)

    def _leave_to_parent(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # an unlock here would free the parent's
            self._fd = -1


def take(path: Path, name: str, note: str) -> Lock | None:
    """Take a lock in a directory, and leave a note about the holder; None if it is held.

    A :func:`holder` that looks just now keeps it, too: it may be free a moment later. This raises
    :class:`LockDirectoryError` where others could write, or where the directory is a link.
    """
    fd = _opened(path, name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, note.encode()[:_NOTE_NBYTES], 0)
    return Lock(fd)


def holder(path: Path, name: str) -> str | None:
    """Return the note of a lock's holder; None if nobody holds it."""
    fd = _opened(path, name)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return os.pread(fd, _NOTE_NBYTES, 0).decode(errors="replace")
    finally:
        os.close(fd)
    return None


def _opened(path: Path, name: str) -> int:
    """Return a lock's file, open."""
    # Any user may make a directory in /tmp: only this user's own is trusted. Files are opened
    # relative to the checked directory, and never through a symbolic link.
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # Only the last directory gets this mode; its parents are made as usual.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | flags)
    except OSError as error:
        raise LockDirectoryError(str(path), _why_not_opened(error)) from error
    try:
        found, uid = os.fstat(directory), os.geteuid()
        if found.st_uid != uid:
            why = f"belongs to user {found.st_uid} and not to {uid}, who runs this process"
            raise LockDirectoryError(str(path), why)
        if found.st_mode & 0o022:
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            raise LockDirectoryError(str(path), f"can be written by others, its mode is {mode}")
        return os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=directory)
    except OSError as error:
        raise LockDirectoryError(str(path / name), _why_not_opened(error)) from error
    finally:
        os.close(directory)


def _why_not_opened(error: OSError) -> str:
    # A link gives ELOOP; in the place of a directory, it gives ENOTDIR or EEXIST.
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
        return "is a symbolic link or no directory"
    return f"cannot be opened: {error.strerror}"


_open_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    # Without this, a forked child would keep the locks of a worker that was killed.
    for lock in list(_open_locks):
        lock._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
