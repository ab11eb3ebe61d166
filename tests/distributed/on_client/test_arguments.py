"""The arguments of ``LocalDeviceCluster``: what is wrong is refused before anything starts."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dask_devctx import LocalDeviceCluster
from dask_devctx.client.cluster import _known
from tests.distributed.on_client.test_cluster import leftovers

PAGE = Path(__file__).parents[3] / "docs" / "from-dask-cuda.md"


def test_the_page_shows_every_argument_of_dask_cuda() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (works|leave it out|write).* \|$", PAGE.read_text(), re.M)
    )
    assert len(rows) == 27
    for name, here in rows.items():
        if here == "works":
            _known({name: None}, LocalDeviceCluster)
            continue
        with pytest.raises(TypeError, match=f"no option '{name}'"):
            _known({name: None}, LocalDeviceCluster)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"worker_class": "dask_cuda.CUDAWorker"}, TypeError, "is a class .*got 'dask_cuda.CUDAW"),
        ({"n_workers": "0,1"}, TypeError, r"n_workers is a number.*devices=\[0, 1\]"),
        ({"threads_per_worker": 2.5}, ValueError, "threads_per_worker must .* 1 or more, got 2.5"),
        ({"device": 0}, TypeError, r"no option 'device'. Did you mean devices\?"),
        ({"protocol": "ucx"}, ImportError, "protocol='ucx' needs the package d"),
        ({"pre_import": "wave"}, TypeError, r"config.set\({'devctx.pre-import': 'wave'}\)"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, TypeError, r"Write devices=\[0, 1\]"),
        ({"jit_unspill": True}, TypeError, "no option 'jit_unspill'. Leave it out: device_memory"),
        ({"enable_nvlink": True}, TypeError, "Leave it out: values go by CUDA IPC"),
        ({"death_timeouts": 1}, TypeError, r"Did you mean death_timeout\?"),
        ({"rmm_pool_size": 0.5, "allocator": "cupy-async"}, TypeError, "either allocator or RMM"),
        ({"n_workers": 3, "devices": [0, 1]}, ValueError, r"need 3, and the cluster has 2\. Start"),
    ],
)
def test_what_is_refused_is_said_before_anything_starts(
    arguments: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("distributed_ucxx", "ucp"):
        monkeypatch.setitem(sys.modules, name, None)
    before = set(psutil.Process().children(recursive=True))
    start = time.monotonic()
    with pytest.raises(error, match=said):
        LocalDeviceCluster(**arguments)
    assert time.monotonic() - start < 1
    assert leftovers(before) == set()
