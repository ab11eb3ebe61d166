"""Every kind of value, made on one GPU and used on another: right, or refused with a clear error.

One process has a cluster with both GPUs and passes all there is; the tests look at what it saw.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.kinds_of_values import KINDS, Kind, make, use, where
from tests.gpu.own_process import answer_of

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(320)]

# So long one task may take; none is to hang.
_PATIENCE_S = 40


def pass_everything(n_workers: int) -> dict[str, Any]:
    import dask
    from distributed import Client

    from dask_devctx import LocalDeviceCluster

    def tried(device: int, function: Callable[..., Any], *args: Any) -> Any:
        with dask.annotate(device=device):
            future = client.submit(function, *args, pure=False)
        try:
            return {"gave": future.result(timeout=_PATIENCE_S)}
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {error}"[-1500:]}

    seen: dict[str, Any] = {}
    with (
        LocalDeviceCluster(n_workers=n_workers, devices=[0, 1], dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for name, kind in KINDS.items():
            if kind.missing:
                continue
            print(name, file=sys.stderr, flush=True)
            with dask.annotate(device=0):
                value = client.submit(make, name, pure=False)
            seen[name] = {
                "here": tried(0, use, name, value),
                "there": tried(1, use, name, value),
                "where": tried(1, where, value),
                "source": tried(0, use, name, value),
                "home": tried(0, where, value),
            }
    return seen


@pytest.fixture(scope="module", params=[1], ids=lambda n: f"{n} worker")
def everything(request: pytest.FixtureRequest) -> dict[str, Any]:
    seen: dict[str, Any] = answer_of(
        "tests.gpu.test_values", str(request.param), XLA_PYTHON_CLIENT_PREALLOCATE="false"
    )
    return seen


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_is_right_on_the_other_gpu(kind: Kind, everything: dict[str, Any]) -> None:
    if kind.name not in everything:
        pytest.skip(f"{kind.missing} is not installed")
    seen = everything[kind.name]
    assert "gave" in seen["here"], seen["here"]["raised"]
    here = seen["here"]["gave"]
    assert kind.check(here, seen["source"]["gave"]), "the source was written to"
    if "raised" in seen["there"]:
        assert kind.may_be_refused, seen["there"]["raised"]
        assert "Timeout" not in seen["there"]["raised"]
        return
    assert kind.check(here, seen["there"]["gave"])
    if kind.on_device:
        assert seen["home"]["gave"] == [0]
        assert seen["where"]["gave"] == [1]


if __name__ == "__main__":
    print(json.dumps(pass_everything(int(sys.argv[1]))))
