"""A scheduler and hosts with workers, started again when they end, and the faults they have."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from dask_devctx.config.options import LOOK_AHEAD
from tests.soak import tasks

DEVICES, WORKERS = 4, 2
MEMORY, LIMIT = "64 MiB", "6 MiB"


class Program:
    """A program that is started again when it ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command, self._env, self._log = list(command), {**os.environ, **env}, log
        self._stop = threading.Event()
        self.starts = 0
        self.refused = ""
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
            status = self.process.poll()
            if status == 2:  # a command line that is refused now is refused again
                self.refused = self._log.read_text()[-500:]
                break
            if status is not None:
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
        at: tuple[str, Sequence[str], str | None],
        scheduler: str,
        place: Path,
        env: Mapping[str, str],
        *,
        devices: int,
        gpus: bool,
    ) -> None:
        ip, inside, self._link = at
        self._gpus = gpus
        own = place / f"host{number}"
        own.mkdir()
        command = [*inside, sys.executable, "-m", "dask_devctx.cli", "worker", scheduler]
        command += ["--host", ip, "--n-workers", "1", "--no-dashboard", "--oom-retries", "3"]
        command += ["--preload", "tests.soak.tasks", "--device-memory-limit", LIMIT]
        command += ["--local-directory", str(own)]
        command += ["--nthreads", str(LOOK_AHEAD * devices // WORKERS)]
        if number % 2 == 0:  # on the other hosts, workers divide the devices among themselves
            command += ["--devices-per-worker", str(devices // WORKERS)]
        more = {"LOCK_DIRECTORY": str(own / "locks"), "IPC_STAGING": "4 MiB"}
        if not gpus:  # a worker that was killed is soon there again
            command += ["--multiprocessing-method", "forkserver"]
            more |= {"SIMULATED_HOST": own.name, "SIMULATED_MEMORY": MEMORY}
            more["SIMULATED_DEVICES"] = str(devices)
        env = {**env, **{f"DASK_DEVCTX__{name}": text for name, text in more.items()}}
        self.programs = [
            Program(command, env, place / f"{own.name}.{worker}.log") for worker in range(WORKERS)
        ]

    def kill(self) -> None:
        """Kill all of its processes; the programs are started again."""
        for program in self.programs:
            program.kill()

    def close(self) -> None:
        for program in self.programs:
            program.close()

    def a_worker(self, chance: random.Random) -> psutil.Process | None:
        """Return a worker's process, not its nanny's."""
        found = [one for program in self.programs for one in program.processes()]
        workers = list(filter(_is_worker, found))
        return chance.choice(workers) if workers else None

    def send(self, chance: random.Random, number: signal.Signals) -> bool:
        """Send a signal to a worker; return whether there is one."""
        if number in tasks.BREAKS and self._gpus:
            return False
        if (one := self.a_worker(chance)) is not None:
            one.send_signal(number)
        return one is not None

    def stop_one(self, chance: random.Random) -> bool:
        """Let a worker stand still for a while."""
        if (one := self.a_worker(chance)) is not None:
            one.suspend()
            time.sleep(0.5 + 4 * chance.random())
            one.resume()
        return one is not None

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


# -- faults

# How often each fault happens in an hour, and what it is.
FAULTS: dict[str, tuple[float, Callable[[random.Random, Host, Scheduler], object]]] = {
    "worker killed": (60, lambda chance, host, _: host.send(chance, signal.SIGKILL)),
    "worker stood still": (40, lambda chance, host, _: host.stop_one(chance)),
    "hardware failed": (24, lambda chance, host, _: host.send(chance, signal.SIGUSR1)),
    "device broke, nobody guilty": (24, lambda chance, host, _: host.send(chance, signal.SIGUSR2)),
    "network gone, short": (24, lambda chance, host, _: host.cut_off(0.2 + 3 * chance.random())),
    # Longer than dask waits for a connection.
    "network gone, long": (8, lambda chance, host, _: host.cut_off(20.0)),
    "host killed": (12, lambda chance, host, _: host.kill()),
    "scheduler restarted": (12, lambda chance, _, scheduler: scheduler.kill()),
}


class Faults:
    """Makes random faults at random moments, each on a thread of its own."""

    def __init__(self, seed: int, scheduler: Scheduler, hosts: Sequence[Host]) -> None:
        self._scheduler, self._hosts, self._seed = scheduler, hosts, seed
        self.made: Counter[str] = Counter()
        self._stop = threading.Event()
        self._running: list[threading.Thread] = []

    def begin(self, factor: float) -> None:
        """Make so many times the usual number of faults from now on."""
        if factor:
            self._begin(self._go_on, random.Random(f"{self._seed} faults"), factor / 3600)

    def _begin(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._running.append(thread)
        thread.start()

    def _go_on(self, chance: random.Random, factor: float) -> None:
        rates = [rate for rate, _ in FAULTS.values()]
        while not self._stop.wait(chance.expovariate(sum(rates) * factor)):
            [name] = chance.choices(list(FAULTS), rates)
            self._begin(self._make, name, random.Random(chance.random()))

    def _make(self, name: str, chance: random.Random) -> None:
        try:
            happened = FAULTS[name][1](chance, chance.choice(self._hosts), self._scheduler)
        except psutil.NoSuchProcess:
            return  # it had ended
        except Exception as error:
            print(f"{name}: {error!r}", file=sys.stderr)
            return
        if happened is not False:
            self.made[name] += 1

    def close(self) -> None:
        """Begin no more faults, and wait for those that last."""
        self._stop.set()
        while self._running:
            self._running.pop().join()


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
