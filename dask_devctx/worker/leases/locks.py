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
from pathlib import Path

from dask_devctx.errors import LockDirectoryError

_MUTEX = "mutex.lock"
_POLL_S = 0.005
_NOTE_NBYTES = 512


# Given the note of a process that ended without freeing its lock, and the time of its last sign of
# life, returns whether the lock is kept for that process's successor.
Kept = Callable[[str, float], bool]


def default_directory() -> Path:
    """Return the directory of this user's locks, ``/tmp/dask-devctx-<uid>``.

    Notes
    -----
    The directory depends only on the user, because processes with different directories do not
    exclude each other. Under many batch systems, each job has its own ``TMPDIR``.
    ``XDG_RUNTIME_DIR`` is set in a login session but not in a service, and is deleted when the last
    session ends. ``systemd-tmpfiles`` does not delete locked files.
    """
    place = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    return Path(place) / f"dask-devctx-{os.geteuid()}"


class Lock:
    """A lock that is held.

    Parameters
    ----------
    fd
        The open file; the lock owns it from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Free the lock; nothing happens if it is free already."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.ftruncate(fd, 0)  # a file with a note is one that its holder did not free
            # Closing is not enough: a forked child may have the file open.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def touch(self) -> None:
        """Give a sign of life, as the time of the lock's file."""
        if self._fd >= 0:
            os.utime(self._fd)

    def _leave_to_parent(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # an unlock here would free the parent's
            self._fd = -1


class LockDirectory:
    """The directory of the locks, opened once and checked.

    Parameters
    ----------
    path
        The directory. It is made, with mode 0700, if it does not exist.

    Raises
    ------
    LockDirectoryError
        The path is a symbolic link or no directory, belongs to another user, or others can write
        there.

    Notes
    -----
    Any user may make a directory in ``/tmp``, so only this user's own files are trusted. Files are
    opened relative to the checked directory, and never through a symbolic link.
    """

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
            self.close()
            raise LockDirectoryError(str(self.path), reason)

    def close(self) -> None:
        """Close the directory; locks that are held stay held."""
        os.close(self._fd)

    def __enter__(self) -> LockDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def try_lock(self, name: str, note: str, kept: Kept | None = None) -> Lock | None:
        """Return the lock of this name, or None if another process or worker holds it.

        Parameters
        ----------
        name
            The file's name.
        note
            The text about the holder, which :meth:`note` returns to others.
        kept
            Whether a lock whose holder ended without freeing it is kept; by default, none is.

        Raises
        ------
        LockDirectoryError
            The file is a symbolic link or belongs to another user.
        """
        while True:
            fd = self._open(name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine, there = os.fstat(fd), self._stat(name)
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            if there is None or (mine.st_ino, mine.st_dev) != (there.st_ino, there.st_dev):
                os.close(fd)  # it was deleted meanwhile: others would lock a new file
                continue
            if _is_kept(fd, kept):
                os.close(fd)
                return None
            lock = Lock(fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, note.encode()[:_NOTE_NBYTES], 0)
            return lock

    def note(self, name: str) -> str:
        """Return the text that the holder of a lock wrote about itself."""
        try:
            fd = self._open(name, os.O_RDONLY)
        except FileNotFoundError:
            return "an unknown process, whose lock file is gone"
        try:
            return _read(fd) or "another process"
        finally:
            os.close(fd)

    def is_free(self, name: str, kept: Kept | None = None) -> bool:
        """Return whether a process can have a lock; call it while others are excluded.

        ``kept`` is as for :meth:`try_lock`.
        """
        fd = self._open(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not _is_kept(fd, kept)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Exclude others from choosing locks in the directory while this is open.

        Raises
        ------
        LockDirectoryError
            Another process chose locks for ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        note = f"pid {os.getpid()}"
        while (lock := self.try_lock(_MUTEX, note)) is None:
            if time.monotonic() > deadline:
                who = self.note(_MUTEX)
                raise LockDirectoryError(
                    str(self.path), f"was kept locked by {who} for {timeout_s} s"
                )
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            lock.release()

    def _open(self, name: str, flags: int) -> int:
        path = str(self.path / name)
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would wait
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        except FileNotFoundError:
            raise
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


def _read(fd: int) -> str:
    return os.pread(fd, _NOTE_NBYTES, 0).decode(errors="replace")


def _is_kept(fd: int, kept: Kept | None) -> bool:
    """Return whether the holder of a lock ended without freeing it, and the lock is kept."""
    left = _read(fd) if kept else ""
    return bool(kept and left and kept(left, os.fstat(fd).st_mtime))


def why_not_ours(found: os.stat_result, uid: int) -> str:
    """Return the reason why a user cannot trust a directory or file, or "".

    Parameters
    ----------
    found
        The result of ``fstat``.
    uid
        The user.
    """
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


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    # Without this, a forked child would keep the locks of a worker that was killed.
    for lock in list(_held):
        lock._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
