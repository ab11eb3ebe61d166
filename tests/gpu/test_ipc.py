"""Values go from GPU to GPU between workers in order, and a worker that breaks does so alone.

Each scenario has a process of its own with two workers: on two GPUs, or on one where there is one.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import dask
import pytest
from distributed import Client, wait

from dask_devctx import LocalDeviceCluster, devices, report
from tests.distributed.peers import staged
from tests.gpu.own_process import answer_of, first_device

pytestmark = [pytest.mark.gpu(count=1), pytest.mark.timeout(320)]

ROUNDS = 200
BREAKS = 20


# -- the scenarios


class Pair:
    def __init__(self) -> None:
        dask.config.set({"distributed.comm.timeouts.connect": "5s"})
        one = {"devices": [0], "shared": True}
        self.cluster = LocalDeviceCluster(
            n_workers=2,
            memory_limit=0,
            dashboard_address=":0",
            **({"devices": [0, 1]} if len(devices()) > 1 else one),
        )
        self.client = Client(self.cluster)
        self.workers: list[str] = []
        self.look()

    def look(self, *, ended: str = "") -> None:
        """Wait for both workers, and for the end of one; the first drives the first GPU."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                found = self.client.run(first_device)
            except Exception:  # one is ending
                found = {}
            if len(found) == 2 and None not in found.values() and ended not in found:
                self.workers = sorted(found, key=found.__getitem__)
                return
            time.sleep(0.2)
        raise TimeoutError("the workers did not come back")

    def send(self, make: Any, args: Any, use: Any, back: bool = False) -> Any:
        source, target = reversed(self.workers) if back else self.workers
        made = self.client.submit(make, *args, workers=[source], pure=False)
        return self.client.submit(use, made, workers=[target], pure=False).result(timeout=60)

    def meet(self) -> None:
        """Send both ways until no value goes through the host: a busy GPU delays the first test."""
        until = time.monotonic() + 60
        for back in (False, True):
            before = self.ways().get("ipc", 0)
            while self.ways().get("ipc", 0) == before:
                assert time.monotonic() < until, self.reasons()
                self.send(marked, (10, 1.0), mark_of, back=back)
                time.sleep(0.2)

    def ways(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for row in report(self.client).transfers:
            found[row.transport] = found.get(row.transport, 0) + row.copies
        return found

    def reasons(self) -> list[str]:
        """Return the reasons why values went through the host."""
        return [
            row.reason or "unknown"
            for row in report(self.client).transfers
            if row.transport == "host"
        ]

    def staged(self) -> list[int]:
        return list(self.client.run(staged).values())


_SLOW = r"""
extern "C" __global__ void slow(double* x, int n, double value, unsigned long long cycles) {
    // Where the GPU takes turns with other processes, another multiprocessor may go on with this,
    // and its clock may be behind: as an unsigned number, the difference ends the wait.
    unsigned long long begun = clock64();
    while (clock64() - begun < cycles) {}
    for (int i = 0; i < n; i++) x[i] = value;
}
"""


def late(mark: float) -> Any:
    """An array written long after its task, in a blocking stream of the task's own."""
    import cupy

    x = cupy.zeros(1000)
    cupy.cuda.Stream.null.synchronize()
    with cupy.cuda.Stream():
        cupy.RawKernel(_SLOW, "slow")((1,), (1,), (x, 1000, mark, 30_000_000))
    return x


def mark_of(x: Any) -> float:
    return float(x[-1].item())


def busy(n: int) -> int:
    """Leave a kernel behind that writes to memory which is given out again."""
    import cupy

    x = cupy.zeros(n)
    cupy.cuda.Stream.null.synchronize()
    cupy.RawKernel(_SLOW, "slow")((1,), (1,), (x, n, -1.0, 30_000_000))
    return 0


def marked(n: int, mark: float) -> Any:
    import cupy

    x = cupy.full(n, mark)
    cupy.cuda.Stream.null.synchronize()
    return x


def least(x: Any) -> float:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    return float(x.min().item())


def order() -> Any:
    pair = Pair()
    pair.meet()
    before = pair.ways()
    wrong = {"made": 0, "given out again": 0}
    for n in range(1, ROUNDS + 1):
        wrong["made"] += pair.send(late, (float(n),), mark_of, back=n % 2 == 0) != n
        made = pair.client.submit(marked, 1000, float(n), workers=pair.workers[:1], pure=False)
        wait(made, timeout=60)
        pair.client.submit(busy, 1000, workers=pair.workers[1:], pure=False).result(timeout=60)
        used = pair.client.submit(least, made, workers=pair.workers[1:], pure=False)
        wrong["given out again"] += used.result(timeout=60) != n
    ways = {way: n - before.get(way, 0) for way, n in pair.ways().items() if n > before.get(way, 0)}
    found = {"wrong": wrong, "ways": ways, "staged": pair.staged()}
    return {**found, "reasons": pair.reasons()}


def illegal() -> None:
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void bad(int* x) { *x = 1; }', "bad")
    kernel((1,), (1,), (8,))
    cupy.cuda.runtime.deviceSynchronize()


def broken(how: str) -> Any:
    pair = Pair()
    wrong = killed_others = 0
    for n in range(BREAKS):
        victim = n % 2
        other = pair.workers[1 - victim]
        made = pair.client.submit(
            marked,
            2**28,  # 2 GiB: more than passes at once
            float(n),
            workers=pair.workers[:1],
            allow_other_workers=True,
            pure=False,
        )
        wait(made, timeout=60)
        pids = pair.client.run(os.getpid)
        used = pair.client.submit(
            least, made, workers=pair.workers[1:], allow_other_workers=True, pure=False
        )
        if how == "kill":
            time.sleep(0.003 * (n % 7))
            os.kill(pids[pair.workers[victim]], signal.SIGKILL)
        else:
            bad = pair.client.submit(illegal, workers=[pair.workers[victim]], pure=False)
        wrong += used.result(timeout=120) != n
        if how != "kill":
            with suppress(TimeoutError):  # a suspect waits for its worker's address, which is gone
                bad.exception(timeout=10)
            bad.cancel()
        pair.look(ended=pair.workers[victim])  # it still answers when its task has its error
        killed_others += other not in pair.workers
        del used, made
    wrong += pair.send(marked, (1000, 5.0), least) != 5.0
    until = time.monotonic() + 20
    while any(pair.staged()) and time.monotonic() < until:
        time.sleep(0.1)
    return {"wrong": wrong, "others": killed_others, "staged": pair.staged()}


# -- the tests


def test_copies_come_after_the_work_before_them() -> None:
    found = answer_of(order)
    assert found["wrong"] == {"made": 0, "given out again": 0}
    assert found["ways"] == {"ipc": 2 * ROUNDS}, found["reasons"]
    assert not any(found["staged"])


@pytest.mark.parametrize("how", ["kill", "illegal address"])
def test_one_worker_ends_in_the_middle_of_a_transfer(how: str) -> None:
    found = answer_of(broken, how)
    assert found["wrong"] == 0
    assert found["others"] == 0
    assert not any(found["staged"])
