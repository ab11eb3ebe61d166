"""Devices that fail for real: an illegal address, and 1 TiB asked for.

Each scenario runs in a process of its own with a cluster of its own, and what breaks is a worker of
that cluster: nothing that is broken here is ever used by the tests' process.
"""

from __future__ import annotations

import os
from typing import Any

import dask
import pytest

from tests.gpu.own_process import answer_of, connected, output_of
from tests.gpu.test_scopes import need

pytestmark = [pytest.mark.gpu(count=1), pytest.mark.timeout(320)]

MIB = 2**20


def allocate(library: str, nbytes: int) -> int:
    if library == "cupy":
        import cupy

        return int(cupy.empty(nbytes, dtype=cupy.uint8).nbytes)
    import torch

    return int(torch.empty(nbytes, dtype=torch.uint8, device="cuda").numel())


def describe(error: BaseException | None) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "cause": type(getattr(error, "__cause__", None)).__name__,
        **{
            name: getattr(error, name)
            for name in ("free_nbytes", "requested_nbytes")
            if hasattr(error, name)
        },
    }


def one_tebibyte(library: str) -> dict[str, Any]:
    with connected(n_workers=1) as client:
        (before,) = client.run(os.getpid).values()
        with dask.annotate(device=0):
            error = client.submit(allocate, library, 2**40).exception(timeout=120)
        fits = client.submit(allocate, library, MIB).result(timeout=60)
        (after,) = client.run(os.getpid).values()
        return {"error": describe(error), "fits": fits, "same process": before == after}


# -- the tests


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_task_errs_whose_kernel_breaks_the_device_later(workers: int) -> None:
    need("cupy")
    given = {"tasks": 120, "batch": 60, "devices": 2, "guilty": 1, "faults": 0, "workers": workers}
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    output_of("tests.soak", "--gpus", *options)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_one_tebibyte(library: str) -> None:
    need(library)
    seen = answer_of(one_tebibyte, library)
    assert seen["error"]["type"] == "DeviceOutOfMemoryError", seen
    assert seen["error"]["cause"] == "OutOfMemoryError"
    assert seen["error"]["requested_nbytes"] == 2**40
    assert seen["error"]["free_nbytes"] > 0
    assert seen["fits"] == MIB
    assert seen["same process"], "out of memory is no reason to end a process"
