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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dask_devctx.errors import LockDirectoryError

_MUTEX = "mutex.lock"
_POLL_S = 0.005
_LOOKS: Final = 3  # at a lock that is held and has no note
_NOTE_NBYTES = 512


def default_directory() -> Path:
    """Return the directory of this user's locks, ``/tmp/dask-devctx-<uid>``."""
    # It depends only on the user: processes with different directories do not exclude each other.
    # Under many batch systems, each job has its own TMPDIR. XDG_RUNTIME_DIR is set in a login
    # session but not in a service. systemd-tmpfiles does not delete locked files.
    place = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    return Path(place) / f"dask-devctx-{os.geteuid()}"


class Lock:
    """An open lock file, which :meth:`close` or :meth:`release` closes."""

    def __init__(self, fd: int, is_held: bool) -> None:
        self._fd = fd
        self.is_held = is_held  # by this object
        self.users = 1
        _open_locks.add(self)

    @property
    def note(self) -> str:
        """The note of the holder, or of one that ended without releasing the lock."""
        return os.pread(self._fd, _NOTE_NBYTES, 0).decode(errors="replace")

    @property
    def last_sign(self) -> float:
        """The time of the holder's last sign of life."""
        return os.fstat(self._fd).st_mtime

    def claim(self, note: str) -> None:
        """Leave a note about the holder."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, note.encode()[:_NOTE_NBYTES], 0)

    def touch(self) -> None:
        """Give a sign of life, as the time of the lock's file."""
        if self._fd >= 0:
            os.utime(self._fd)

    def release(self) -> None:
        """Free the lock and remove the note; nothing happens if it is free already."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            self.close()

    def close(self) -> None:
        """Free the lock; a note stays, as that of a holder that ended."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if self.is_held:  # closing is not enough: a forked child may have the file open
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _leave_to_parent(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # an unlock here would free the parent's
            self._fd = -1


class LockDirectory:
    """The directory of the locks, opened once and checked; made if it does not exist.

    It raises :class:`LockDirectoryError` where others could write, or where it is a link.
    """

    # Any user may make a directory in /tmp, so only this user's own files are trusted. Files are
    # opened relative to the checked directory, and never through a symbolic link.

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # Only the last directory gets this mode; its parents are made as usual.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(0o700, exist_ok=True)
            self._fd = os.open(
                self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            raise LockDirectoryError(str(self.path), _why_not_opened(error)) from error
        if reason := why_not_ours(os.fstat(self._fd), os.geteuid()):
            os.close(self._fd)
            raise LockDirectoryError(str(self.path), reason)

    def __enter__(self) -> LockDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)  # locks that are held stay held

    def lock(self, name: str) -> Lock:
        """Open a lock, and hold it if nobody else does."""
        looks = _LOOKS
        while True:
            fd = self._open(name)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine, there = os.fstat(fd), self._stat(name)
            except BlockingIOError:
                theirs = Lock(fd, is_held=False)
                looks -= 1
                if theirs.note or not looks:
                    return theirs
                theirs.close()  # without a note, it is being taken or released just now
                time.sleep(_POLL_S)
                continue
            except BaseException:
                os.close(fd)
                raise
            if there is not None and (mine.st_ino, mine.st_dev) == (there.st_ino, there.st_dev):
                return Lock(fd, is_held=True)
            os.close(fd)  # it was deleted meanwhile: others would lock a new file

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Exclude others from choosing locks in the directory while this is open."""
        deadline = time.monotonic() + timeout_s
        while not (lock := self.lock(_MUTEX)).is_held:
            who = lock.note
            lock.close()
            if time.monotonic() > deadline:
                reason = f"was kept locked by {who} for {timeout_s} s"
                raise LockDirectoryError(str(self.path), reason)
            time.sleep(_POLL_S)
        lock.claim(f"pid {os.getpid()}")
        try:
            yield
        finally:
            lock.release()

    def _open(self, name: str) -> int:
        path = str(self.path / name)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        flags |= os.O_NONBLOCK  # opening a pipe would wait
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        except OSError as error:
            raise LockDirectoryError(path, _why_not_opened(error)) from error
        found = os.fstat(fd)
        reason = why_not_ours(found, os.geteuid())
        if not reason and not stat.S_ISREG(found.st_mode):
            reason = "is not a file"
        if reason:
            os.close(fd)
            raise LockDirectoryError(path, reason)
        return fd

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None


def why_not_ours(found: os.stat_result, uid: int) -> str:
    """Return the reason why a user cannot trust a directory or file, or ""."""
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid} and not to {uid}, who runs this process"
    if found.st_mode & 0o022:
        return f"can be written by others, its mode is {stat.S_IMODE(found.st_mode):04o}"
    return ""


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
