"""Locks: who is kept out, when they end, and what is not trusted."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import dask
import pytest

from dask_devctx import DevctxError, Device
from dask_devctx.worker.leases import locks


def taken(holder: str = "") -> ExitStack | None:
    """Take a device's lock; None where somebody else has it."""
    return locks.take(Device(0), holder)


def holder() -> str | None:
    """Return the note of the lock's holder; None where nobody holds it."""
    return locks.held_devices([Device(0)]).get(Device(0))


def test_two_holders_of_one_process_exclude_each_other() -> None:
    lock = taken("me, for a long time")
    assert taken() is None
    assert holder().endswith(", me, for a long time")
    lock.close()
    lock.close()  # once more is nothing
    assert holder() is None
    with taken("you"):
        assert holder().endswith(", you")


def test_the_directory_is_the_users_own(lock_directory: Path) -> None:
    taken().close()
    assert lock_directory.stat().st_mode & 0o777 == 0o700
    (lock,) = lock_directory.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600


def linked(path: Path) -> None:
    (path.parent / "there").mkdir(mode=0o700)
    path.symlink_to(path.parent / "there")


def theirs(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (linked, "symbolic link"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "symbolic link"),
        (Path.touch, "no directory"),
        (lambda path: path.mkdir() or path.chmod(0o777), "its mode is 0777"),
        (theirs, "belongs to user 12345"),
    ],
)
def test_a_directory_that_is_not_the_users_own_is_refused(
    make: Callable[[Path], None], reason: str, lock_directory: Path, tmp_path: Path
) -> None:
    make(lock_directory)
    said = f"{lock_directory} .*{reason}.*devctx.lock-directory"
    with pytest.raises(DevctxError, match=said):
        taken()
    assert not (tmp_path / "nowhere").exists()


def test_a_linked_lock_is_refused_and_its_target_left_alone(
    lock_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("keep")
    taken().close()
    (lock,) = lock_directory.iterdir()
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(DevctxError, match="symbolic link"):
        taken()
    assert (tmp_path / "precious").read_text() == "keep"


def test_the_default_depends_on_the_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with dask.config.set({"devctx.lock-directory": None}):
        before = locks.directory()
        monkeypatch.setenv("TMPDIR", "/var/tmp")
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
        assert locks.directory() == before
    assert str(os.geteuid()) in before.name
    with dask.config.set({"devctx.lock-directory": "~/locks"}):
        assert locks.directory() == Path.home() / "locks"


def test_a_full_disk_leaves_no_device_locked() -> None:
    full = patch.object(os, "pwrite", side_effect=OSError("no space"))
    with full, pytest.raises(OSError, match="no space"):
        taken()
    taken().close()
