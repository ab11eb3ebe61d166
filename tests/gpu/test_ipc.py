"""Values of every library go from GPU to GPU between workers: whole, in order, and broken alone.

Each scenario has a process of its own with a cluster of a worker for each of two GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.own_process import answer_of

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(320)]

ROUNDS = 200
BREAKS = 20


# -- what runs in the workers: how a value is made, and what is told of it


def cupy_array(n: int = 1000, order: str = "C") -> Any:
    import cupy

    return cupy.arange(float(n)).reshape(2, n // 2).astype("f8", order=order)


def strided() -> Any:
    return cupy_array()[:, ::3]


def views() -> Any:
    x = cupy_array()
    return {"x": x, "same": [x, x.T]}


def sparse() -> Any:
    from cupyx.scipy.sparse import csr_matrix

    return csr_matrix(cupy_array())


def numba_array() -> Any:
    import numpy
    from numba import cuda

    return cuda.to_device(numpy.arange(1000.0).reshape(2, 500))


def jax_array() -> Any:
    import jax

    from dask_devctx import Device

    device = Device.current()
    assert device is not None
    found = [d for d in jax.local_devices() if d.local_hardware_id == device.device_id]
    return jax.device_put(jax.numpy.arange(1000.0).reshape(2, 500), found[0])


def tensor(kind: str) -> Any:
    import torch

    x = torch.arange(1000.0, device="cuda").reshape(2, 500)
    match kind:
        case "strided":
            return x[:, ::3]
        case "conj":
            return torch.complex(x, x).conj()
        case "coo":
            return x.to_sparse()
        case "csr":
            return x.to_sparse_csr()
        case "grad":
            leaf = x.clone().requires_grad_()
            (leaf * 2).sum().backward()
            return leaf
        case "float8":
            return ((x % 16).to(torch.float8_e4m3fn), "beside")
        case "bfloat16" | "float16" | "bool" | "int8" | "complex64":
            return x.to(getattr(torch, kind))
    return x


def trained() -> Any:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    model[1].weight = model[0].weight  # tied
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def told(value: Any) -> Any:
    """Return a value as plain data, with the ordinals of the devices that it is on."""
    import numpy

    if isinstance(value, (list, tuple)):
        return [told(each) for each in value]
    if isinstance(value, dict) and "model" in value:
        return told_of_model(value)
    if isinstance(value, dict):
        return {**{key: told(each) for key, each in value.items()}, "tied": is_tied(value)}
    if isinstance(value, str):
        return value
    from dask_devctx import device_of

    device = device_of(value)
    where = None if device is None else device.uuid
    if hasattr(value, "copy_to_host"):
        host = value.copy_to_host()
    elif type(value).__module__.startswith("torch"):
        plain = value.detach()
        plain = plain.to_dense() if plain.layout is not sys.modules["torch"].strided else plain
        host = plain.resolve_conj().cpu()
        host = host.to(
            sys.modules["torch"].complex128 if host.is_complex() else sys.modules["torch"].float64
        ).numpy()
        grad = None if not value.is_leaf or value.grad is None else float(value.grad.sum())
        return [
            where,
            str(value.dtype),
            str(value.layout),
            list(value.shape),
            complex(host.sum()).__repr__(),
            grad,
            value.requires_grad,
        ]
    elif hasattr(value, "toarray"):
        host = value.toarray().get()
    else:
        host = numpy.asarray(value.get() if hasattr(value, "get") else value)
    return [where, str(host.dtype), list(host.shape), float(host.sum()), float(host.ravel()[-1])]


def is_tied(value: Any) -> bool:
    x, (same, turned) = value["x"], value["same"]
    return bool(x is same and x.data.ptr == turned.data.ptr)


def told_of_model(value: Any) -> Any:
    model, optimizer = value["model"], value["optimizer"]
    groups = optimizer.param_groups[0]["params"]
    return {
        "where": str(next(model.parameters()).device.type),
        "tied": model[0].weight is model[1].weight,
        "optimized": groups[0] is model[0].weight,
        "state": float(optimizer.state[groups[0]]["exp_avg"].sum()),
        "weights": float(model[0].weight.sum()),
    }


TENSORS = "float32 strided conj coo csr grad float8 bfloat16 float16 bool int8 complex64"

KINDS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cupy": (cupy_array, ()),
    "cupy F": (cupy_array, (1000, "F")),
    "cupy strided": (strided, ()),
    "cupy views": (views, ()),
    "cupy large": (cupy_array, (50_000_000,)),
    "cupyx sparse": (sparse, ()),
    "numba": (numba_array, ()),
    "jax": (jax_array, ()),
    **{f"torch {kind}": (tensor, (kind,)) for kind in TENSORS.split()},
    "torch model and optimizer": (trained, ()),
}


# -- the scenarios


class Pair:
    """A cluster of two workers with a GPU each."""

    def __init__(self) -> None:
        import dask
        from distributed import Client

        from dask_devctx import LocalDeviceCluster

        dask.config.set({"distributed.comm.timeouts.connect": "5s"})
        self.cluster = LocalDeviceCluster(
            n_workers=2, devices=[0, 1], memory_limit=0, dashboard_address=":0"
        )
        self.client = Client(self.cluster)
        self.workers: list[str] = []
        self.look()

    def look(self) -> None:
        """Wait for both workers; the first drives the first GPU."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                found = self.client.run(_first_device)
            except Exception:  # one is ending
                found = {}
            if len(found) == 2 and None not in found.values():
                self.workers = sorted(found, key=found.__getitem__)
                return
            time.sleep(0.2)
        raise TimeoutError("the workers did not come back")

    def send(self, make: Any, args: Any, use: Any, back: bool = False, soft: bool = False) -> Any:
        source, target = reversed(self.workers) if back else self.workers
        options = {"pure": False, "allow_other_workers": soft}
        made = self.client.submit(make, *args, workers=[source], **options)
        return self.client.submit(use, made, workers=[target], **options).result(timeout=60)

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
        from dask_devctx import report

        found: dict[str, int] = {}
        for row in report(self.client).transfers:
            found[row.transport] = found.get(row.transport, 0) + row.copies
        return found

    def reasons(self) -> list[str]:
        """Return the reasons why values went through the host."""
        from dask_devctx import report

        return [
            row.reason or "unknown"
            for row in report(self.client).transfers
            if row.transport == "host"
        ]

    def staged(self) -> list[int]:
        return list(self.client.run(_staged).values())


def _first_device(dask_worker: Any) -> int | None:
    devices = dask_worker.plugins["devctx"].worker_devices
    return devices[0].device_id if devices else None


def _staged(dask_worker: Any) -> int:
    return int(dask_worker.plugins["devctx"].extension.peers.in_use)


def kinds() -> Any:
    pair = Pair()
    seen = {}
    for name, (make, args) in KINDS.items():
        if importlib.util.find_spec(name.split()[0]) is None:
            continue
        before = pair.ways().get("ipc", 0)
        made = pair.client.submit(make, *args, workers=pair.workers[:1], pure=False)
        try:
            here = pair.client.submit(told, made, workers=pair.workers[:1]).result(timeout=60)
            there = pair.client.submit(told, made, workers=pair.workers[1:], pure=False).result(
                timeout=60
            )
        except Exception as error:
            seen[name] = {"error": f"{type(error).__name__}: {error}"[-1500:]}
            continue
        seen[name] = {"here": here, "there": there, "ipc": pair.ways().get("ipc", 0) - before}
    from dask_devctx import Device

    return {"seen": seen, "uuids": [Device(0).uuid, Device(1).uuid]}


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
    """An array that is written long after the task has returned, in a stream of the task's own."""
    import cupy

    x = cupy.zeros(1000)
    cupy.cuda.Stream.null.synchronize()
    with cupy.cuda.Stream(non_blocking=True):
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


def leave_out(name: str) -> None:
    from dask_devctx.transfer.ipc.lanes import Lane

    setattr(Lane, name, lambda self, *args: None)


def order(left_out: str) -> Any:
    from distributed import wait

    pair = Pair()
    pair.meet()
    before = pair.ways()
    if left_out:
        pair.client.run(leave_out, left_out)
    wrong = {"made": 0, "given out again": 0}
    for n in range(1, ROUNDS + 1):
        if left_out != "after_current_streams":
            wrong["made"] += pair.send(late, (float(n),), mark_of, back=n % 2 == 0) != n
        if left_out != "after":
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
    from distributed import wait

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
            bad.exception(timeout=60)
        pair.look()
        killed_others += other not in pair.workers
        del used, made
    wrong += pair.send(marked, (1000, 5.0), least) != 5.0
    until = time.monotonic() + 20
    while any(pair.staged()) and time.monotonic() < until:
        time.sleep(0.1)
    return {"wrong": wrong, "others": killed_others, "staged": pair.staged()}


# -- the tests


@pytest.fixture(scope="module")
def sent() -> Any:
    return answer_of("tests.gpu.test_ipc", "kinds", XLA_PYTHON_CLIENT_PREALLOCATE="false")


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_arrives_as_it_was_without_the_host(name: str, sent: Any) -> None:
    if name not in sent["seen"]:
        pytest.skip(f"{name.split()[0]} is not installed")
    seen = sent["seen"][name]
    assert "error" not in seen, seen["error"]
    first, second = sent["uuids"]
    assert json.loads(json.dumps(seen["here"]).replace(first, second)) == seen["there"]
    assert seen["ipc"] == 1


def test_copies_come_after_the_work_before_them() -> None:
    found = answer_of("tests.gpu.test_ipc", "order", "")
    assert found["wrong"] == {"made": 0, "given out again": 0}
    assert found["ways"] == {"ipc": 2 * ROUNDS}, found["reasons"]
    assert not any(found["staged"])


@pytest.mark.parametrize(
    ("left_out", "what"), [("after", "made"), ("after_current_streams", "given out again")]
)
def test_without_its_event_a_copy_is_wrong(left_out: str, what: str) -> None:
    assert answer_of("tests.gpu.test_ipc", "order", left_out)["wrong"][what] > 0


@pytest.mark.parametrize("how", ["kill", "illegal address"])
def test_one_worker_ends_in_the_middle_of_a_transfer(how: str) -> None:
    found = answer_of("tests.gpu.test_ipc", "broken", how)
    assert found["wrong"] == 0
    assert found["others"] == 0
    assert not any(found["staged"])


if __name__ == "__main__":
    # The workers have to find the functions under this module's name.
    from tests.gpu import test_ipc

    answer = getattr(test_ipc, sys.argv[1])(*sys.argv[2:])
    print(json.dumps(answer), flush=True)
