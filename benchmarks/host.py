"""Runs a contender that starts a cluster in a process of its own.

The processes that it starts end with it, so that a contender that hangs does not stop the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.case import Contender, ContenderFailedError, Missing

START_S = 90.0
ANSWER_S = 60.0
CLOSE_S = 10.0


class Host:
    """A process that holds an object, and calls the object's methods on request.

    Parameters
    ----------
    factory
        ``"module:name"`` of a function that returns a context manager of the object. The process
        calls it.
    *args
        The function's arguments.
    start_s
        The most seconds that the call may take.

    Raises
    ------
    ContenderFailedError
        The object is not made, or not in time.
    """

    def __init__(self, factory: str, *args: Any, start_s: float = START_S) -> None:
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.hosted", str(theirs.fileno()), factory],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                cwd=Path(__file__).parent.parent,  # so that it finds the benchmarks
                start_new_session=True,  # so that one signal ends its workers too
            )
        self._dead = ""
        try:
            self._ask(args, start_s, "starting")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process; the processes that it started are its descendants."""
        return self._process.pid

    def call(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a method of the object, and return its result.

        Raises
        ------
        ContenderFailedError
            The method raised, or did not return in time. In the second case the process ends.
        """
        return self._ask((method, args), timeout_s, method)

    def _ask(self, request: object, timeout_s: float, what: str) -> Any:
        if self._dead:
            raise ContenderFailedError(self._dead)
        try:
            self._pipe.send(request)
            if not self._pipe.poll(timeout_s):
                self._fail(f"no answer within {timeout_s:.0f} s from {what}, process ended")
            done, value = self._pipe.recv()
        except (EOFError, OSError):
            self._fail(f"its process died in {what}")
        if not done:
            if what == "starting":
                self._kill()
            raise ContenderFailedError(value)
        return value

    def _fail(self, reason: str) -> NoReturn:
        self._kill()
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-1:]
        self._dead = "; the last it said: ".join([reason, *last])[:500]
        raise ContenderFailedError(self._dead)

    def close(self) -> None:
        """Let it close its object; kill it and all that it started if that takes too long."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._kill()
        self._pipe.close()
        self._log.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True)
class Entry:
    """A contender that needs a process.

    Parameters
    ----------
    factory, args
        See :class:`Host`.
    options
        Arguments of :class:`~benchmarks.case.Contender` besides the name and ``run``.
    """

    name: str
    factory: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def contender(self, run: Callable[[int], float], **more: Any) -> Contender:
        return Contender(self.name, run, **{**self.options, **more})


@contextlib.contextmanager
def started(entries: Sequence[Entry]) -> Iterator[tuple[list[tuple[Entry, Host]], list[Missing]]]:
    """Start the contenders' processes, all at once; also return those that failed to start."""

    def start(entry: Entry) -> Host | str:
        try:
            return Host(entry.factory, *entry.args)
        except ContenderFailedError as error:
            return str(error)

    hosts: list[tuple[Entry, Host]] = []
    failed: list[Missing] = []
    with ThreadPoolExecutor(len(entries)) as pool:
        try:
            for entry, host in zip(entries, pool.map(start, entries), strict=True):
                if isinstance(host, Host):
                    hosts.append((entry, host))
                else:
                    failed.append(Missing(entry.name, f"FAILED to start: {host}"))
            yield hosts, failed
        finally:
            list(pool.map(lambda one: one[1].close(), hosts))
