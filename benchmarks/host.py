"""A process of its own for a contender that starts a cluster: asked, waited for, ended.

What it starts dies with it, so that a contender that hangs stops nobody else.
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
    """A process that holds an object, and calls its methods when it is asked to.

    Parameters
    ----------
    factory
        ``"module:name"`` of what returns a context manager of the object; called in the process.
    *args
        What it is called with.
    start_s
        How long that may take.

    Raises
    ------
    ContenderFailedError
        The object cannot be made, or not in time.
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
                cwd=Path(__file__).parent.parent,  # where the benchmarks are found
                start_new_session=True,  # its workers are ended with it, as one process group
            )
        self._dead = ""
        try:
            self._ask(args, start_s, "starting")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process; those that it started are its descendants."""
        return self._process.pid

    def call(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """Return what a method of the object returns.

        Raises
        ------
        ContenderFailedError
            It raised, or it did not return in time, after which the process is ended.
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
        """Let it close what it holds; end it and all that it started if that takes too long."""
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
        What :class:`~benchmarks.case.Contender` takes beside its name and ``run``.
    """

    name: str
    factory: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def contender(self, run: Callable[[int], float], **more: Any) -> Contender:
        return Contender(self.name, run, **{**self.options, **more})


@contextlib.contextmanager
def started(entries: Sequence[Entry]) -> Iterator[tuple[list[tuple[Entry, Host]], list[Missing]]]:
    """Start the contenders' processes, all at once; also give those that failed to start."""

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
