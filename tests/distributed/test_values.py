"""Values of every kind, through a cluster: right where they are used, or as with plain dask."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import dask
import pytest

from dask_devctx import Device, DevicePlugin, SimulatedArray, driver
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import nbytes_by_device, release_held
from tests.distributed.devices import here, make, on_cluster, submit_on, with_plugin
from tests.transfer.hostile import CONTAINERS, EndsSomething, Thing
from tests.transfer.order import Order
from tests.transfer.shapes import shape_of
from tests.transfer.test_walk import nested

# One worker with all four devices, and one for each.
SHAPES: dict[str, Callable[[Any], Any]] = {
    "one worker": with_plugin(16),
    "four workers": on_cluster(
        *(4, 4, 4, 4), worker_kwargs={"plugins": [DevicePlugin(devices_per_worker=1)]}
    ),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def total(x: Any, *more: Any, **named: Any) -> tuple[float, int | None]:
    """Compute on all that is given, which has to be on this task's device."""
    arrays = [x, *more, *named.values()]
    return sum(float(array.sum()) for array in arrays), here()


def total_of_pair(pair: dict[str, Any]) -> float:
    return float((pair["x"] + pair["more"][0]).sum())


def where(value: Any) -> set[int]:
    return {device.device_id for device in nbytes_by_device(value)}


def hidden() -> SimulatedArray:
    order = driver.backend().machine.order
    order.give("hidden", 0, order.stream(0, blocking=False))  # which is not current in the end
    return make()


@with_plugin()
async def test_a_result_comes_after_all_work_of_its_task(client: Any, *_: Any) -> None:
    machine = driver.backend().machine
    machine.order = Order(machine)
    made = submit_on(client, 0, hidden)
    assert await submit_on(client, 1, total, made) == (100.0, 1)
    machine.faults.clear()
    assert release_held() == 0
    assert any(at == 1 and "hidden" in work for at, work in machine.order.before_allocations)


def run(shape: str, body: Callable[..., Any]) -> None:
    SHAPES[shape](body)()


@shapes
def test_what_a_task_is_given_by_value_is_on_its_device(shape: str) -> None:
    async def body(client: Any, scheduler: Any, *workers: Any) -> None:
        with Device(2):
            x = make()
        for device in range(4):
            with dask.annotate(device=device):
                futures = [
                    *client.map(total, [x] * 3, pure=False),
                    client.submit(total, x, more=x, pure=False),
                    client.submit(functools.partial(total, x), x, key=f"partial-{device}"),
                    client.submit(functools.partial(total, more=x), x, key=f"named-{device}"),
                    client.submit(Thing(x).__class__, x, pure=False),
                    client.submit(total_of_pair, {"x": x, "more": [x]}, pure=False),
                ]
                made = client.submit(make, pure=False)
                mixed = client.submit(total_of_pair, {"x": made, "more": (x,)}, pure=False)
                later = client.submit(total_later, x, pure=False)
                lazy = client.compute(dask.delayed(total, pure=False)(x, named=[x][0]))
            results = await client.gather(futures)
            assert results[:3] == [(100.0, device)] * 3
            assert results[3:5] == [(200.0, device)] * 2
            assert results[5] == (200.0, device)
            assert results[7] == 200.0
            assert await mixed == 200.0
            assert await later == 100.0
            assert await lazy == (200.0, device)

    run(shape, body)


async def total_later(x: SimulatedArray) -> float:
    await asyncio.sleep(0)
    return float(x.sum())


def around(kind: str) -> Any:
    x = make(n=4)
    return CONTAINERS[kind]([x, [x, "host"]])


def see(value: Any) -> tuple[Any, set[int]]:
    return shape_of(value), where(value)


# Of those that plain dask can send from worker to worker.
_SENT = [
    *("list", "tuple", "dict", "named tuple", "namespace", "partial", "object", "slotted"),
    *("dataclass", "frozen and slotted", "by reduce", "by state"),
]


@shapes
def test_each_type_is_used_on_every_device_and_stays_where_it_was(shape: str) -> None:
    async def body(client: Any, *workers: Any) -> None:
        for kind in sorted(CONTAINERS) if len(workers) == 1 else _SENT:
            made = submit_on(client, 0, around, kind, pure=False)
            before = await submit_on(client, 0, see, made, pure=False)
            for device in (1, 2, 3, 1):
                found, at = await submit_on(client, device, see, made, pure=False)
                assert at == {device}, kind
                assert found == before[0] or len(workers) > 1, kind
            assert await submit_on(client, 0, see, made, pure=False) == before, kind

    run(shape, body)


@with_plugin()
async def test_one_that_cannot_be_moved_fails_the_task_that_needs_it_elsewhere(
    client: Any, worker: Any
) -> None:
    made = submit_on(client, 0, lambda: [EndsSomething(make())], pure=False)
    assert await submit_on(client, 0, where, made, pure=False) == {0}
    failed = submit_on(client, 1, where, made, pure=False)
    with pytest.raises(DevctxError, match="EndsSomething"):
        await failed
    assert where(worker.data[made.key]) == {0}


def depth_of(value: Any) -> int:
    depth = 0
    while type(value) is list:
        value, depth = value[0], depth + 1
    return depth


@pytest.mark.parametrize("depth", [600, 10_000])
@with_plugin()
async def test_a_value_of_many_objects(client: Any, worker: Any, depth: int) -> None:
    made = client.submit(nested, depth, "host", pure=False)
    for device in (0, 1):
        assert await submit_on(client, device, depth_of, made, pure=False) == depth
    [wide] = await client.scatter([[[i] for i in range(depth)]])
    assert await client.submit(len, wide) == depth
    while not worker.data.is_host_data(wide.key):  # no other task searches it
        await asyncio.sleep(0.01)
