"""A scheduler and hosts with workers, as processes that are started again when they end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from dask_devctx.config.options import LOOK_AHEAD

DEVICES, WORKERS = 4, 2
MEMORY, LIMIT = "64 MiB", "6 MiB"


class Program:
    """A program that is started again when it ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command, self._env, self._log = list(command), {**os.environ, **env}, log
        self._stop = threading.Event()
        self.starts = 0
        self.process = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=log, start_new_session=True
            )

    def _keep(self) -> None:
        while not self._stop.wait(0.1):
            if self.process.poll() is not None:
                self.process = self._start()

    def processes(self) -> list[psutil.Process]:
        """Return the process and all that it started."""
        with suppress(psutil.NoSuchProcess):
            mine = psutil.Process(self.process.pid)
            return [mine, *mine.children(recursive=True)]
        return []

    def kill(self) -> None:
        """End it and all that it started, at once; it is started again."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        self._stop.set()
        self._keeper.join()
        self.kill()
        self.process.wait()


class Scheduler(Program):
    """A scheduler at an address that stays the same."""

    def __init__(self, ip: str, port: int, place: Path, env: Mapping[str, str]) -> None:
        self.address = f"tcp://{ip}:{port}"
        command = [sys.executable, "-m", "dask", "scheduler", "--host", ip, "--port", str(port)]
        command += ["--no-dashboard", "--preload", "dask_devctx"]
        super().__init__(command, env, place / "scheduler.log")


class Host:
    """A host with devices of its own, and workers that share them out."""

    def __init__(
        self,
        number: int,
        ip: str,
        scheduler: str,
        place: Path,
        env: Mapping[str, str],
        inside: Sequence[str] = (),
        link: str | None = None,
        *,
        devices: int,
        gpus: bool,
    ) -> None:
        self._link, self._gpus = link, gpus
        own = place / f"host{number}"
        own.mkdir()
        command = [sys.executable, "-m", "dask_devctx.cli", "worker", scheduler, "--host", ip]
        command += ["--n-workers", "1", "--no-dashboard", "--oom-retries", "3"]
        command += ["--preload", "tests.soak.preload", "--device-memory-limit", LIMIT]
        command += ["--local-directory", str(own)]
        command += ["--nthreads", str(LOOK_AHEAD * devices // WORKERS)]
        if number % 2 == 0:  # on the other hosts, workers divide the devices among themselves
            command += ["--devices-per-worker", str(devices // WORKERS)]
        if not gpus:  # a worker that was killed is soon there again
            command += ["--multiprocessing-method", "forkserver"]
        more = {"DASK_DEVCTX__LOCK_DIRECTORY": str(own / "locks")}
        more["DASK_DEVCTX__IPC_STAGING"] = "4 MiB"
        if not gpus:
            more |= {
                "DASK_DEVCTX__SIMULATED_HOST": own.name,
                "DASK_DEVCTX__SIMULATED_DEVICES": str(devices),
                "DASK_DEVCTX__SIMULATED_MEMORY": MEMORY,
            }
        self._programs = [
            Program([*inside, *command], {**env, **more}, place / f"{own.name}.{worker}.log")
            for worker in range(WORKERS)
        ]

    @property
    def starts(self) -> int:
        """How often its programs were started."""
        return sum(program.starts for program in self._programs)

    def workers(self) -> list[psutil.Process]:
        """Return the workers' processes, without the nannies."""
        found = (one for program in self._programs for one in program.processes())
        return [one for one in found if _is_worker(one)]

    def kill(self) -> None:
        """Kill all of its processes; the programs are started again."""
        for program in self._programs:
            program.kill()

    def close(self) -> None:
        for program in self._programs:
            program.close()

    def send(self, chance: random.Random, number: signal.Signals) -> bool:
        """Send a signal to a worker; return whether there is one."""
        found = self.workers()
        with suppress(psutil.NoSuchProcess):
            if found:
                chance.choice(found).send_signal(number)
                return True
        return False

    def break_devices(self, chance: random.Random, number: signal.Signals) -> bool:
        """Break the simulated devices of a worker, as ``preload`` says."""
        return not self._gpus and self.send(chance, number)

    def stop_one(self, chance: random.Random, seconds: float) -> bool:
        """Let a worker stand still for a while."""
        found = self.workers()
        with suppress(psutil.NoSuchProcess):
            if found:
                one = chance.choice(found)
                one.suspend()
                time.sleep(seconds)
                one.resume()
                return True
        return False

    def cut_off(self, seconds: float) -> bool:
        """Let the host have no network for a while."""
        if self._link is None:
            return False
        _ip("link", "set", self._link, "down")
        try:
            time.sleep(seconds)
        finally:
            _ip("link", "set", self._link, "up")
        return True


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        words = " ".join(process.cmdline())
        # A nanny's child, once it has more threads than it begins with.
        started = "spawn_main" in words or "forkserver" in words
        return started and process.num_threads() > 2
    return False


# -- the network


def can_cut() -> bool:
    """Return whether this process may make network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    name = f"soak{os.getpid()}t"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError:
        return False
    return True


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network(count: int, cut: bool) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Make a network with some hosts; yield this process's address, and of each host three parts.

    These are its address, the words before a command that run it there, and its link. Without
    ``cut`` the hosts are addresses of the loopback device.
    """
    if not cut:
        yield "127.0.0.1", [(f"127.0.0.{n + 2}", [], None) for n in range(count)]
        return
    net, tag = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}", f"sk{os.getpid()}"
    bridge = f"{tag}b"
    with ExitStack() as steps:
        _ip("link", "add", bridge, "type", "bridge")
        steps.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        hosts: list[tuple[Any, ...]] = []
        for number in range(count):
            name, outer, inner = f"{tag}n{number}", f"{tag}o{number}", f"{tag}i{number}"
            _ip("netns", "add", name)
            steps.callback(_ip, "netns", "del", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            _ip("link", "set", outer, "master", bridge)
            _ip("link", "set", outer, "up")
            inside = ["ip", "netns", "exec", name]
            for words in (
                ["addr", "add", f"{net}.{number + 2}/24", "dev", inner],
                ["link", "set", inner, "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run([*inside, "ip", *words], check=True, capture_output=True)
            hosts.append((f"{net}.{number + 2}", inside, outer))
        yield f"{net}.1", hosts
