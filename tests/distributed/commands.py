"""dask's own commands, as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Command:
    """A process that is running, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._more:
                self.said += line
                self._more.notify_all()
        self.process.stdout.close()

    def says(self, text: str, timeout_s: float = 30) -> bool:
        """Wait until it has said this; False if it ended without, or took too long."""
        with self._more:
            return self._more.wait_for(lambda: text in self.said, timeout_s)

    def ends(self, timeout_s: float = 30) -> int:
        """Return the exit status; where it does not end, fail with what it said and does."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler says where each thread is
            self._reader.join(10)
            raise AssertionError(f"it did not end in {timeout_s} s:\n{self.said}") from None

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()


@contextmanager
def dask_command(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Command]:
    """Run ``dask …``, with more variables; what it says on both of its streams is kept."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "dask", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})},
    )
    command = Command(process)
    try:
        yield command
    finally:
        command.end()
