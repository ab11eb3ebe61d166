"""dask's P2P rechunk of CuPy's arrays, which dask chooses by itself for large graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.own_process import answer_of, connected

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(320)]
N = 4000


def numbers() -> Any:
    return np.random.default_rng(0).integers(0, 10**9, (N, N))


def rechunk(n_workers: int, chunk: int) -> dict[str, Any]:
    import cupy
    import dask.array as da

    def seen(x: Any, expected: Any) -> tuple[str, bool, bool]:
        return (
            type(x).__module__,
            int(x.device) == cupy.cuda.Device().id,
            bool((x == expected).all()),
        )

    with connected(devices=[0, 1], n_workers=n_workers) as client:
        x = da.from_array(numbers(), chunks=chunk).map_blocks(cupy.asarray)
        columns = x.rechunk((N, chunk // 2), method="p2p").to_delayed().ravel()
        futures = client.compute(columns.tolist())
        expected = np.split(numbers(), N // (chunk // 2), axis=1)
        checks = [
            client.submit(lambda x, e: seen(x, cupy.asarray(e)), *both, pure=False)
            for both in zip(futures, expected, strict=True)
        ]
        return {"found": sorted(set(map(str, client.gather(checks))))}


@pytest.mark.parametrize("chunk", [1000, 100])
@pytest.mark.parametrize("n_workers", [1, 2])
def test_right_and_on_the_device_of_the_task(n_workers: int, chunk: int) -> None:
    pytest.importorskip("cupy")
    assert answer_of(rechunk, n_workers, chunk)["found"] == ["('cupy', True, True)"]
