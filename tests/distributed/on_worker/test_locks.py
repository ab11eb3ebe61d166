"""Locks: who is kept out, when they end, and what is not trusted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dask_devctx.errors import LockDirectoryError
from dask_devctx.worker.leases import locks

HOLD = """
import os, sys, time
from pathlib import Path
from dask_devctx.worker.leases.locks import take
lock = take(Path(sys.argv[1]), "gpu.lock", "the child")
os.fork() or print("forked", flush=True)
time.sleep(60)
"""


def taken(directory: Path, note: str = "") -> locks.Lock | None:
    """Take the lock; None where somebody else has it."""
    return locks.take(directory, "gpu.lock", note)


def holder(directory: Path) -> str | None:
    """Return the note of the lock's holder; None where nobody holds it."""
    return locks.holder(directory, "gpu.lock")


def test_two_holders_of_one_process_exclude_each_other(lock_directory: Path) -> None:
    lock = taken(lock_directory, "me, for a long time")
    assert taken(lock_directory) is None
    assert holder(lock_directory) == "me, for a long time"
    lock.close()
    lock.close()  # once more is nothing
    assert holder(lock_directory) is None
    again = taken(lock_directory, "you")
    assert holder(lock_directory) == "you"
    again.close()


def test_a_forked_child_keeps_no_lock_of_a_killed_parent(lock_directory: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(lock_directory)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert child.stdout.readline() == "forked\n"
        assert taken(lock_directory) is None
        assert holder(lock_directory) == "the child"
        child.kill()
        child.wait()
        os.killpg(child.pid, 0)  # the grandchild lives: nothing to prove otherwise
        assert holder(lock_directory) is None
        lock = taken(lock_directory)
        lock.close()
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def test_a_forked_child_does_not_free_the_parents_lock(lock_directory: Path) -> None:
    lock = taken(lock_directory)
    pid = os.fork()
    if pid == 0:
        lock.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert taken(lock_directory) is None
    lock.close()


def test_the_directory_is_the_users_own(lock_directory: Path) -> None:
    lock = taken(lock_directory)
    lock.close()
    assert lock_directory.stat().st_mode & 0o777 == 0o700
    assert (lock_directory / "gpu.lock").stat().st_mode & 0o777 == 0o600


def linked(path: Path) -> None:
    (path.parent / "there").mkdir(mode=0o700)
    path.symlink_to(path.parent / "there")


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def theirs(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (linked, "symbolic link"),
        (dangling, "symbolic link"),
        (Path.touch, "no directory"),
        (open_to_all, "its mode is 0777"),
        (theirs, "belongs to user 12345"),
    ],
)
def test_a_directory_that_is_not_the_users_own_is_refused(
    make: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "locks"
    make(path)
    with pytest.raises(LockDirectoryError, match=reason) as caught:
        taken(path)
    assert caught.value.path == str(path)
    assert "devctx.lock-directory" in str(caught.value)
    assert not (tmp_path / "nowhere").exists()


def test_a_linked_lock_is_refused_and_its_target_left_alone(
    lock_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("keep")
    lock_directory.mkdir(mode=0o700, exist_ok=True)
    (lock_directory / "gpu.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(LockDirectoryError, match="symbolic link"):
        taken(lock_directory)
    assert (tmp_path / "precious").read_text() == "keep"


def test_the_default_depends_on_the_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = locks.default_directory()
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert locks.default_directory() == before
    assert str(os.geteuid()) in before.name
