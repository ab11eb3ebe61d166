"""Every kind of value on real GPUs: right where it is used, sent, spilled or written to disk.

For each layout one process has a cluster and passes all kinds; the tests look at what it saw.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import dask
import numpy as np
import pytest
from distributed import wait

from dask_devctx import Device, report
from dask_devctx.transfer import device_of, nbytes_by_device, to_device
from tests.gpu.kinds import KINDS, make, missing, same, use, use_at_home, where
from tests.gpu.own_process import answer_of, connected, first_device

pytestmark = pytest.mark.timeout(320)

# So long one task may take; none is to hang.
_PATIENCE_S = 40
ONE, TWO = pytest.mark.gpu(count=1), pytest.mark.gpu(count=2)
LAYOUTS: dict[str, tuple[dict[str, Any], pytest.MarkDecorator]] = {
    "one worker": ({"n_workers": 1, "devices": [0, 1]}, TWO),
    "two workers": ({"n_workers": 2, "devices": [0, 1]}, TWO),
    "two workers on one GPU": ({"n_workers": 2, "devices": [0], "shared": True}, ONE),
    "with a disk": ({"n_workers": 1, "devices": [0]}, ONE),
}


async def leave(key: str, to_disk: bool, dask_worker: Any) -> bool:
    data = dask_worker.data
    for _ in range(1000):  # small values share allocations, which stay while one of them is in use
        for device in dask_worker.plugins["devctx"].worker_devices:
            data.spill.clear(device)
        (value,) = data.values_of([key])
        if value.is_away and (not to_disk or key in data.fast):
            break
        await asyncio.sleep(0.01)
    else:
        return False
    if to_disk:
        data.fast.evict(key)
    return not to_disk or key in data.slow


def pass_everything(layout: str) -> dict[str, Any]:

    def by_ipc() -> int:
        return sum(row.copies for row in report(client).transfers if row.transport == "ipc")

    def at(device: int, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        with dask.annotate(device=device):
            future = client.submit(function, *args, workers=[worker], pure=False)
        return tried(future.result, timeout=_PATIENCE_S)

    def tried(what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return {"gave": what(*args, **kwargs)}
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {error}"[-1500:]}

    def fetched_and_used(name: str, value: Any) -> Any:
        return use_at_home(name, value.result(timeout=_PATIENCE_S))

    options, _ = LAYOUTS[layout]
    last = options["devices"][-1]
    seen: dict[str, Any] = {}
    with connected(**options, memory_limit="60GiB") as client:
        found = client.run(first_device)
        workers = sorted(found, key=found.__getitem__)
        source, target = workers[0], workers[-1]
        for name, kind in KINDS.items():
            if missing(name) or not (kind.sent or len(options["devices"]) > options["n_workers"]):
                continue
            print(name, file=sys.stderr, flush=True)
            before = by_ipc()
            with dask.annotate(device=0):
                value, other = (
                    client.submit(make, name, workers=[source], pure=False) for _ in range(2)
                )
            seen[name] = {
                "here": at(0, source, use, name, value),
                "there": at(last, target, use, name, value),
                "where": at(last, target, where, value),
                "source": at(0, source, use, name, value),
                "home": at(0, source, where, value),
                "ipc": by_ipc() - before,
            }
            if kind.sent:
                wait(other)
                disk = "disk" in layout
                seen[name] |= {
                    "client": tried(fetched_and_used, name, value),
                    "left": client.run(leave, other.key, disk, workers=[source])[source],
                    "back": at(0, source, use, name, other),
                }
    return seen


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=mark) for name, (_, mark) in LAYOUTS.items()]
)
def everything(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return request.param, answer_of(pass_everything, request.param, **variables)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_right_everywhere(name: str, everything: tuple[str, dict[str, Any]]) -> None:
    layout, all_seen = everything
    if name not in all_seen:
        pytest.skip(f"{missing(name)} is not installed" if missing(name) else "it is not sent")
    seen, kind = all_seen[name], KINDS[name]
    assert "gave" in seen["here"], seen["here"]["raised"]
    here = seen["here"]["gave"]
    places = ["source", "there"]
    if kind.sent:
        places += ["back", "client"]
    for place in places:
        assert "gave" in seen[place], (place, seen[place]["raised"])
        assert same(here, seen[place]["gave"]), place
    if kind.on_device:
        assert seen["home"]["gave"] == [0]
        assert seen["where"]["gave"] == LAYOUTS[layout][0]["devices"][-1:]
    assert bool(seen["ipc"]) == (LAYOUTS[layout][0]["n_workers"] == 2), "it went through the host"
    assert seen.get("left", True) is True


@TWO
@pytest.mark.usefixtures("two_gpus")
def test_torch_keeps_what_autograd_needs() -> None:
    torch = pytest.importorskip("torch")
    leaf = torch.ones(3, device="cuda:0", requires_grad=True)
    there = to_device(leaf, 1)
    assert there.is_leaf
    assert there.requires_grad
    to_device(leaf * 2, 1).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]
    host = torch.ones(3)
    assert to_device(host, 1) is host


@TWO
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["cupy no elements", "torch no elements"])
def test_what_has_no_elements_is_on_its_device(name: str) -> None:
    if missing(name):
        pytest.skip(f"{missing(name)} is not installed")
    assert device_of(to_device(make(name), 1)) is Device(1)


@TWO
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["torch tensor", "cupy Fortran order", "numba array", "jax array"])
def test_to_the_host_while_another_device_is_current(name: str) -> None:
    if missing(name):
        pytest.skip(f"{missing(name)} is not installed")
    with Device(1):
        there = make(name)
    assert device_of(there) is Device(1)
    host = to_device({"x": there}, "cpu")["x"]
    assert Device.current() is Device(0)
    assert device_of(host) is None
    if name == "torch tensor":
        assert host.device.type == "cpu"
        host = host.numpy() * 7
    elif name == "cupy Fortran order":
        assert host.flags.f_contiguous
        host = host * 7
    assert type(host) is np.ndarray
    np.testing.assert_allclose(host, np.arange(24.0).reshape(4, 6), rtol=1e-6)


@TWO
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")  # torch's own
@pytest.mark.parametrize(("layout", "indices"), [("to_sparse", 2 * 4 * 8), ("to_sparse_csr", 72)])
def test_the_bytes_of_a_sparse_torch_tensor(layout: str, indices: int) -> None:
    torch = pytest.importorskip("torch")
    x = getattr(torch.eye(4, device="cuda:0"), layout)()
    assert nbytes_by_device(x) == {Device(0): indices + 4 * 4}
