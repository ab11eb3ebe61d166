"""Locks that die with their process: files in a directory that only this user can write.

``flock`` is held by an open file, not by a process: two workers of one process exclude each other
as two processes do, and the kernel frees a lock when its file is closed, however the process ends.
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

from dask_devctx.errors import LockDirectoryError

_MUTEX = "mutex.lock"
_POLL_S = 0.005
_NOTE_NBYTES = 512


def default_directory() -> Path:
    """Return the directory where this user's processes lock, ``/tmp/dask-devctx-<uid>``.

    Notes
    -----
    It depends on nothing but the user, because processes that look in different places do not
    exclude each other: ``TMPDIR`` is a job's own under many batch systems, and
    ``XDG_RUNTIME_DIR`` is set in a login session, not in a service, and is deleted when the last
    session ends. ``systemd-tmpfiles`` leaves files alone that are locked.
    """
    place = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    return Path(place) / f"dask-devctx-{os.geteuid()}"


class Lock:
    """A lock that is held.

    Parameters
    ----------
    fd
        The open file; it is the lock's from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Free it; nothing happens if it is free."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # Explicitly: a forked child may have the file open, and closing ours would not do.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _leave_to_parent(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # an unlock here would free the parent's
            self._fd = -1


class LockDirectory:
    """The directory of the locks, opened once and checked.

    Parameters
    ----------
    path
        Where; made, with mode 0700, if it is not there.

    Raises
    ------
    LockDirectoryError
        It is a symbolic link, is no directory, is another user's, or others can use it.

    Notes
    -----
    A directory in ``/tmp`` could have been put there by anyone, so nothing in it is trusted that
    is not ours: files are opened relative to the directory that was checked and never through a
    symbolic link.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # The mode is the last directory's alone; those above it are made as usual.
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

    def try_lock(self, name: str, note: str) -> Lock | None:
        """Return the lock of this name, or None if somebody else holds it.

        Parameters
        ----------
        name
            The file's name.
        note
            What :meth:`note` is to tell others about us.

        Raises
        ------
        LockDirectoryError
            The file is a symbolic link or another user's.
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
                os.close(fd)  # it was deleted meanwhile: a lock on it would keep nobody out
                continue
            lock = Lock(fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, note.encode()[:_NOTE_NBYTES], 0)
            return lock

    def note(self, name: str) -> str:
        """Return what the holder of a lock said about itself."""
        try:
            fd = self._open(name, os.O_RDONLY)
        except FileNotFoundError:
            return "nobody any more"
        try:
            return os.pread(fd, _NOTE_NBYTES, 0).decode(errors="replace") or "another process"
        finally:
            os.close(fd)

    @contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Keep everybody else out of the directory for as long as it takes to choose locks.

        Raises
        ------
        LockDirectoryError
            Somebody else was in there for ``timeout_s`` seconds.
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
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe's open would wait
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


def why_not_ours(found: os.stat_result, uid: int) -> str:
    """Return why a directory or file cannot be trusted by a user, or "".

    Parameters
    ----------
    found
        What ``fstat`` says of it.
    uid
        The user.
    """
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid} and not to {uid}, who runs this process"
    if found.st_mode & 0o022:
        return f"can be written by others, its mode is {stat.S_IMODE(found.st_mode):04o}"
    return ""


def _why_not_opened(error: OSError) -> str:
    # A link gives ELOOP, and ENOTDIR or EEXIST where a directory was wanted.
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
        return "is a symbolic link or no directory"
    return f"cannot be opened: {error.strerror}"


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    # Else a forked child would keep the locks of a worker that was killed.
    for lock in list(_held):
        lock._leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
