"""A value that cannot be read where it arrives fails its task, and harms nothing else."""

from __future__ import annotations

import time
from typing import Any

import dask
import pytest
from distributed import wait

from dask_devctx import DevicePlugin
from tests.distributed import peers
from tests.distributed.devices import on_cluster


class Unreadable:
    """Pickled well, and raises where it is read."""

    def __init__(self, error: type[Exception], beside: Any = None) -> None:
        self.error = error
        self.beside = beside

    def __reduce__(self) -> Any:
        return _raise, (self.error, self.beside)


def _raise(error: type[Exception], beside: Any) -> Any:
    raise error("no such thing here")


def _with_array(error: type[Exception]) -> Any:
    return [peers.array(10), Unreadable(error)]


def _identity(value: Any) -> Any:
    return value


@on_cluster(2, 2)
async def test_its_task_fails_with_the_reason_and_the_connection_is_not_used_again(
    client: Any, a: Any, b: Any
) -> None:
    await client.register_plugin(DevicePlugin())
    for error in (ValueError, EOFError, FileNotFoundError):
        for annotation in ("auto", None):
            with dask.annotate(device=annotation or "none"):
                bad = client.submit(Unreadable, error, workers=[a.address], pure=False)
                good = client.submit(_identity, 5, workers=[a.address], pure=False)
                await wait([bad, good])
                started = time.monotonic()
                use = client.submit(len, bad, workers=[b.address], pure=False)
                with pytest.raises(error, match="no such thing here") as failed:
                    await use.result(timeout=20)
                assert time.monotonic() - started < 5
                assert "could not be read when it arrived" in str(failed.value.__notes__)
                # On whichever connection there is now.
                use = client.submit(_identity, good, workers=[b.address], pure=False)
                assert await use.result(timeout=20) == 5


@on_cluster(8, 8, 8)
async def test_what_comes_with_it_arrives_and_another_task_fails_too(
    client: Any, a: Any, b: Any, c: Any
) -> None:
    await client.register_plugin(DevicePlugin())
    good = client.map(_identity, range(10), workers=[a.address], pure=False)
    bad = client.submit(Unreadable, ValueError, workers=[a.address], pure=False)
    await wait([*good, bad])
    with_bad = client.submit(lambda *values: len(values), *good, bad, workers=[b.address])
    without = client.submit(lambda *values: sum(values), *good, workers=[b.address])
    assert await without.result(timeout=20) == 45
    for use in (with_bad, *(client.submit(len, bad, workers=[w.address]) for w in (b, c))):
        with pytest.raises(ValueError, match="no such thing here"):
            await use.result(timeout=20)
    use = client.submit(lambda value: value.error, bad, workers=[a.address], pure=False)
    assert await use.result(timeout=20) is ValueError


def test_a_value_on_a_device_that_cannot_be_read() -> None:
    with peers.cluster(2) as (client, workers):
        for error in (ValueError, EOFError, OSError):
            with pytest.raises(error, match="no such thing here"):
                peers.send(client, lambda e=error: _with_array(e), len, workers)
            assert peers.send(client, peers.array, peers.last, workers) == (1.0, True)
        assert peers.nothing_staged(client)
        assert "host" not in peers.ways(client)
