"""Locks that end with their process: files in a directory that only this user can write.

An open file, not a process, holds a ``flock``. So two workers of one process exclude each other as
two processes do, and the kernel frees a lock when its file is closed, also after a crash.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dask_devctx.errors import LockDirectoryError

_POLL_S = 0.005
_NOTE_NBYTES = 512


def default_directory() -> Path:
    """Return the directory of this user's locks, ``/tmp/dask-devctx-<uid>``."""
    # It depends only on the user: processes with different directories do not exclude each other.
    # Under many batch systems, each job has its own TMPDIR. XDG_RUNTIME_DIR is set in a login
    # session but not in a service. systemd-tmpfiles does not delete locked files.
    place = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    return Path(place) / f"dask-devctx-{os.geteuid()}"


class Lock:
    """An open lock file, held unless somebody else holds it, until it is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True  # by this object
        except BlockingIOError:
            self.is_held = False
        _open_locks.add(self)

    @property
    def note(self) -> str:
        """The note of the holder."""
        return os.pread(self._fd, _NOTE_NBYTES, 0).decode(errors="replace")

    def claim(self, note: str) -> None:
        """Leave a note about the holder."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, note.encode()[:_NOTE_NBYTES], 0)

    def close(self) -> None:
        """Free the lock, as the end of its process does; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if self.is_held:  # closing is not enough: a forked child may have the file open
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _leave_to_parent(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # an unlock here would free the parent's
            self._fd = -1


@contextmanager
def choosing(
    path: Path, timeout_s: float, mutex_name: str = "mutex.lock"
) -> Iterator[Callable[[str], Lock]]:
    """Exclude others from choosing locks in a directory; gives the function that opens one.

    It raises :class:`LockDirectoryError` where others could write, where it is a link, or after the
    timeout.
    """
    directory = _opened(path)
    try:
        lock = partial(_lock, path, directory)
        deadline = time.monotonic() + timeout_s
        while not (mutex := lock(mutex_name)).is_held:
            who = mutex.note
            mutex.close()
            if time.monotonic() > deadline:
                raise LockDirectoryError(str(path), f"was kept locked by {who} for {timeout_s} s")
            time.sleep(_POLL_S)
        mutex.claim(f"pid {os.getpid()}")
        try:
            yield lock
        finally:
            mutex.close()
    finally:
        os.close(directory)  # locks that are held stay held


def _opened(path: Path) -> int:
    # Any user may make a directory in /tmp: only this user's own is trusted. Files are opened
    # relative to the checked directory, and never through a symbolic link.
    try:
        # Only the last directory gets this mode; its parents are made as usual.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LockDirectoryError(str(path), _why_not_opened(error)) from error
    found, uid, reason = os.fstat(directory), os.geteuid(), ""
    if found.st_uid != uid:
        reason = f"belongs to user {found.st_uid} and not to {uid}, who runs this process"
    elif found.st_mode & 0o022:
        reason = f"can be written by others, its mode is {stat.S_IMODE(found.st_mode):04o}"
    if reason:
        os.close(directory)
        raise LockDirectoryError(str(path), reason)
    return directory


def _lock(path: Path, directory: int, name: str) -> Lock:
    """Open a lock, and hold it if nobody else does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return Lock(os.open(name, flags, 0o600, dir_fd=directory))
    except OSError as error:
        raise LockDirectoryError(str(path / name), _why_not_opened(error)) from error


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
