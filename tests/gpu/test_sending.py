"""What each library has on a GPU reaches the client, another worker and the disk, and comes back.

One process has a cluster of one worker for each GPU and sends all there is; the tests look at what
it saw.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.own_process import answer_of

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(320)]

NUMBERS = [[float(6 * row + column) for column in range(6)] for row in range(4)]


# -- what runs in the workers


def make_cupy(layout: str) -> Any:
    import cupy

    x = cupy.asarray(NUMBERS)
    match layout:
        case "F":
            return cupy.asfortranarray(x)
        case "strided":
            return x[::2, ::3]
        case "sparse":
            return importlib.import_module("cupyx.scipy.sparse").csr_matrix(x)
    return x


def make_numba(layout: str) -> Any:
    import numpy
    from numba import cuda

    x = cuda.to_device(numpy.asarray(NUMBERS))
    return x[::2, ::3] if layout == "strided" else x


def make_torch(kind: str) -> Any:
    import torch

    x = torch.tensor(NUMBERS, device="cuda")
    match kind:
        case "strided":
            return x[::2, ::3]
        case "bfloat16":
            return x.bfloat16()
        case "sparse":
            return x.to_sparse()
        case "conjugate":
            return (x * 1j).conj()
        case "requires_grad":
            return x.requires_grad_()
        case "parameter":
            return torch.nn.Parameter(x)
        case "module":
            module = torch.nn.Linear(6, 4, bias=False, device="cuda")
            module.weight.data = x
            module.tied = module.weight
            return module
        case "recurrent module":
            module = torch.nn.LSTM(6, 1, bias=False, device="cuda")
            module.weight_ih_l0.data = x
            return module
        case "optimizer":
            return torch.optim.SGD([torch.nn.Parameter(x)], lr=0.5, momentum=0.9)
    return x


def make_jax(_: str) -> Any:
    import jax

    from dask_devctx import Device

    ordinal = Device.current().device_id  # type: ignore[union-attr]
    return jax.device_put(importlib.import_module("numpy").asarray(NUMBERS), jax.devices()[ordinal])


def numbers(value: Any) -> Any:
    """Return what a value has, on the host."""
    library = type(value).__module__.partition(".")[0]
    if library == "torch":
        torch = importlib.import_module("torch")
        if isinstance(value, torch.optim.Optimizer):
            value = value.param_groups[0]["params"][0]
        if isinstance(value, torch.nn.LSTM):
            value(torch.ones(2, 6, device=value.weight_ih_l0.device))  # it works
            value = value.weight_ih_l0
        if isinstance(value, torch.nn.Module):
            assert value.tied is value.weight
            value = value.weight
        value = value.detach().cpu()
        if value.is_sparse:
            value = value.to_dense()
        return (-value.resolve_conj().imag if value.is_complex() else value.float()).tolist()
    if library in ("cupy", "cupyx"):
        value = value.get()
        return (value.toarray() if library == "cupyx" else value).tolist()
    if hasattr(value, "copy_to_host"):
        return value.copy_to_host().tolist()
    return importlib.import_module("numpy").asarray(value).tolist()


def see(value: Any) -> dict[str, Any]:
    """Return what a value is, has, and where it lives."""
    from dask_devctx.transfer import nbytes_by_device

    kind = type(value)
    if kind.__module__.partition(".")[0] == "torch" and hasattr(value, "requires_grad"):
        details = [str(value.dtype), value.requires_grad]
    else:
        details = []
    return {
        "type": kind.__name__,
        "details": details,
        "devices": sorted(device.device_id for device in nbytes_by_device(value)),
        "numbers": numbers(value),
    }


def held(key: str, dask_worker: Any) -> list[int]:
    """Return where a worker has the value of a key, as it arrived."""
    from dask_devctx.transfer import nbytes_by_device

    return sorted(device.device_id for device in nbytes_by_device(dask_worker.data[key]))


def to_disk(key: str, dask_worker: Any) -> bool:
    """Write the value of a key to disk; return whether it is there."""
    dask_worker.data.fast.evict(key)
    return key in dask_worker.data.slow


# -- all of it, in a process of its own


KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    **{f"cupy {kind}": (make_cupy, kind) for kind in ("C", "F", "strided", "sparse")},
    **{f"numba {kind}": (make_numba, kind) for kind in ("C", "strided")},
    **{
        f"torch {kind}": (make_torch, kind)
        for kind in (
            "tensor",
            "strided",
            "bfloat16",
            "sparse",
            "conjugate",
            "requires_grad",
            "parameter",
            "module",
            "recurrent module",
            "optimizer",
        )
    },
    "jax": (make_jax, ""),  # the last: it leaves its default device current where it unpacks
}


def send_everything() -> dict[str, Any]:
    import dask
    from distributed import Client, wait

    from dask_devctx import LocalDeviceCluster

    def tried(what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return what(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[-1500:]

    def seen_at(device: int, value: Any) -> Any:
        with dask.annotate(device=device):
            return tried(client.submit(see, value, pure=False).result, timeout=60)

    seen: dict[str, Any] = {}
    with (
        LocalDeviceCluster(
            device_memory_limit=0,
            n_workers=2,
            devices=[0, 1],
            memory_limit="60GiB",
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        for name, (make, kind) in KINDS.items():
            if importlib.util.find_spec(name.split()[0]) is None:
                continue
            print(name, file=sys.stderr, flush=True)
            with dask.annotate(device=0):
                x, y = (client.submit(make, kind, pure=False) for _ in range(2))
            wait([x, y], timeout=60)
            if x.status != "finished":
                seen[name] = {"here": repr(x.exception())}
                continue
            (owner,) = client.who_has([x])[x.key]
            (other,) = set(client.sync(client.scheduler.identity, n_workers=-1)["workers"]) - {
                owner
            }
            seen[name] = {
                "here": seen_at(0, x),
                "client": tried(lambda x=x: see(x.result(timeout=60))),
                "worker": seen_at(1, x),
                "arrived": tried(lambda x=x, at=other: client.run(held, x.key, workers=[at])[at]),
                "written": tried(
                    lambda y=y, at=owner: client.run(to_disk, y.key, workers=[at])[at]
                ),
                "disk": seen_at(0, y),
            }
    return seen


# -- the tests


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    seen: dict[str, Any] = answer_of(
        "tests.gpu.test_sending", XLA_PYTHON_CLIENT_PREALLOCATE="false"
    )
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_it_travels(name: str, everything: dict[str, Any]) -> None:
    if name not in everything:
        pytest.skip(f"{name.split()[0]} is not installed")
    seen = everything[name]
    made = seen["here"]
    assert isinstance(made, dict), made
    wanted = [row[::3] for row in NUMBERS[::2]] if "strided" in name else NUMBERS
    assert made["numbers"] == wanted, seen
    assert made["devices"] == [0]
    for place, device in (("client", None), ("worker", 1), ("disk", 0)):
        found = seen[place]
        assert found["type"] == made["type"], seen
        assert found["details"] == made["details"], seen
        assert found["numbers"] == wanted, seen
        if device is not None:
            assert found["devices"] == [device], seen
    assert seen["written"] is True
    assert seen["arrived"] == [1], seen


if __name__ == "__main__":
    print(json.dumps(send_everything()))
