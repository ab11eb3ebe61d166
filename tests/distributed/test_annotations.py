"""The ``device`` annotation reaches the worker, or somebody is told."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import dask
import dask.bag as db
import pytest
from dask._task_spec import Task, TaskRef
from dask.core import toposort
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, LocalCluster, Worker
from hypothesis import assume, given
from hypothesis import strategies as st

from dask_devctx import DevctxError, Device, DeviceNotFoundError, DevicePlugin
from dask_devctx.graph.keep import Optimizer, keep_annotations
from dask_devctx.graph.optimize import optimize_array, optimize_bag, optimize_delayed
from tests.distributed.devices import here, started, submit_on, with_plugin, workers_of
from tests.python import python

da = pytest.importorskip("dask.array")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """The optimizers are part of the configuration for one test."""
    with mock.patch.dict(dask.config.config):
        for key in ("array_optimize", "bag_optimize", "delayed_optimize"):
            dask.config.config.pop(key, None)
        keep_annotations()
        yield


def mark(block: Any, add: int = 0) -> Any:
    device = here()
    return block * 10 + (7 if device is None else device)


def marked(x: Any) -> Any:
    return x.map_blocks(mark, dtype=int, name=f"marked-{dask.base.tokenize(x.name)}")


# -- collections


@with_plugin()
async def test_arrays(client: Any) -> None:
    keep_annotations()  # the cluster cleared the configuration
    x = da.zeros(8, chunks=2, dtype=int)
    with dask.annotate(device=1):
        y = marked(x)
    with dask.annotate(device=2):
        z = marked(y)
    with dask.annotate(device=None):
        w = marked(z)
    result = await client.compute(w + 0)
    assert list(result) == [127] * 8
    assert (await client.compute((z + 0).rechunk(4).sum())) == 12 * 8


@with_plugin()
async def test_bags(client: Any) -> None:
    keep_annotations()
    bag = db.from_sequence([0] * 8, npartitions=4)
    with dask.annotate(device=3):
        bag = bag.map(mark)
    with dask.annotate(device=1):
        bag = bag.map(mark)
    assert await client.compute(bag.map(lambda x: x)) == [31] * 8
    assert await client.compute(bag.sum()) == 31 * 8


@pytest.mark.parametrize("fuse", [True, False])
@with_plugin()
async def test_delayed(client: Any, fuse: bool) -> None:
    keep_annotations()
    with dask.annotate(device=None):
        one = dask.delayed(mark)(0)
    with dask.annotate(device=2):
        two = dask.delayed(mark)(one)
    with dask.config.set({"optimization.fuse.delayed": fuse}):
        assert await client.compute(two) == 72


# -- what is done to graphs


def _run(tag: str, log: list[Any], *inputs: str) -> str:
    log.append(tag)
    return f"{tag}({','.join(inputs)})"


@st.composite
def _graphs(draw: st.DrawFn) -> tuple[list[Any], set[Any]]:
    """Layers of tasks, each with an annotation or none, and the keys that are wanted."""
    layers: list[Any] = []
    keys: list[Any] = []
    for number in range(draw(st.integers(1, 6))):
        annotation = draw(st.sampled_from(["absent", None, 0, 1, "cuda:1"]))
        layer = []
        for part in range(draw(st.integers(1, 3))):
            inputs = draw(st.lists(st.sampled_from(keys), max_size=2)) if keys else []
            layer.append(((f"layer{number}", part), inputs))
        keys.extend(key for key, _ in layer)
        layers.append((annotation, layer))
    wanted = draw(st.sets(st.sampled_from(keys), min_size=1))
    return layers, wanted


def _build(layers: list[Any], log: list[Any]) -> tuple[HighLevelGraph, dict[Any, Any]]:
    built, dependencies, expected = {}, {}, {}
    for annotation, layer in layers:
        name = layer[0][0][0]
        tasks = {
            key: Task(key, _run, str(key), log, *[TaskRef(i) for i in inputs])
            for key, inputs in layer
        }
        annotations = {} if annotation == "absent" else {"device": annotation}
        built[name] = MaterializedLayer(tasks, annotations=annotations)
        dependencies[name] = {i[0] for _, inputs in layer for i in inputs}
        for key, _ in layer:
            expected[str(key)] = "none" if annotation is None else annotation
    return HighLevelGraph(built, dependencies), expected


def _execute(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each key and its result."""
    tasks = dict(graph)
    results: dict[Any, Any] = {}
    for key in toposort(tasks, dependencies={k: set(t.dependencies) for k, t in tasks.items()}):
        results[key] = tasks[key]({dep: results[dep] for dep in tasks[key].dependencies})
        yield key, results[key]


@pytest.mark.parametrize("optimize", [optimize_array, optimize_bag, optimize_delayed])
@given(case=_graphs())
def test_each_task_keeps_its_annotation(optimize: Callable[..., Any], case: Any) -> None:
    layers, wanted = case
    log: list[Any] = []
    graph, expected = _build(layers, log)
    plain = dict(_execute(graph))
    assume(any("device" in (layer.annotations or ()) for layer in graph.layers.values()))
    optimized = optimize(graph, list(wanted))
    optimized.validate()
    annotation_of = {}
    for layer in optimized.layers.values():
        by_key = (layer.annotations or {}).get("device", {}.get)
        annotation_of.update({key: by_key(key) or 0 for key in layer})
        annotation_of.update({key: "absent" for key in layer if by_key(key) is None})
    results: dict[Any, Any] = {}
    log.clear()
    for key, results[key] in _execute(optimized):
        assert {expected[tag] for tag in log} <= {annotation_of[key]}
        log.clear()
    assert {key: results[key] for key in wanted} == {key: plain[key] for key in wanted}


# -- the configuration


def test_an_optimizer_of_ones_own_stays() -> None:
    def mine(dsk: Any, keys: Any, **kwargs: Any) -> Any:
        return dsk

    for own in (mine, None, False):
        dask.config.config["array_optimize"] = own
        DevicePlugin()
        assert dask.config.config["array_optimize"] is own


def test_the_configuration_can_still_be_sent() -> None:
    sent = json.loads(json.dumps(dask.config.config["array_optimize"]))
    assert not sent  # which dask takes for no optimizer
    dask.config.config["array_optimize"] = sent
    keep_annotations()
    assert isinstance(dask.config.config["array_optimize"], Optimizer)
    function = pickle.loads(pickle.dumps(dask.config.config["bag_optimize"]))
    bag = db.from_sequence([1])
    assert dict(function(bag.dask, bag.__dask_keys__()))


_PICKLED_BY_MANY_THREADS = """
import pickle, sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from dask_devctx.graph.keep import Optimizer
from dask_devctx.graph.optimize import optimize_array
sys.setswitchinterval(1e-6)
together = Barrier(8)
def send(function):
    together.wait()
    return pickle.loads(pickle.dumps(Optimizer(function)))
with ThreadPoolExecutor(8) as pool:
    for _ in range(50):
        # a function that was not pickled before, as in a process whose first cluster starts
        functions = [type(optimize_array)(optimize_array.__code__, {}) for _ in range(8)]
        assert all(map(callable, pool.map(send, functions)))
"""


def test_nannies_that_start_at_once_can_all_send_the_configuration() -> None:
    python("-c", _PICKLED_BY_MANY_THREADS, timeout=30)


_LONELY_SCHEDULER = """
import asyncio, sys
sys.modules["dask_devctx"] = None  # as where it is not installed
from distributed import Scheduler
async def main():
    async with Scheduler(port=0, dashboard=False, validate=True) as scheduler:
        print(scheduler.address, flush=True)
        await scheduler.finished()
asyncio.run(main())
"""


def test_a_scheduler_without_this_package() -> None:
    async def check(address: str) -> None:
        async with (
            Worker(address, nthreads=8, validate=True),
            Client(address, asynchronous=True) as client,
        ):
            said = (
                r"did not accept .*No module named.* Install dask-devctx where the scheduler runs"
            )
            for plugin in (DevicePlugin(), DevicePlugin(shared=True)):
                with pytest.raises(DevctxError, match=said):
                    await client.register_plugin(plugin)
            assert await client.submit(abs, -1) == 1

    process = subprocess.Popen(
        [sys.executable, "-c", _LONELY_SCHEDULER], stdout=subprocess.PIPE, text=True
    )
    try:
        asyncio.run(check(process.stdout.readline().strip()))
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


# -- values, between processes


class Odd:
    """Names no device."""


def _boom(key: Any) -> int:
    raise RuntimeError("the annotation's function fails")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DASK_DEVCTX__SIMULATED_DEVICES", "4")
        with started(LocalCluster, n_workers=1, threads_per_worker=8, processes=True) as client:
            client.register_plugin(DevicePlugin())
            yield client


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param(lambda: 2, {2}, id="ordinal"),
        pytest.param(lambda: "cuda:3", {3}, id="name"),
        pytest.param(lambda: Device(1), {1}, id="Device"),
        pytest.param(lambda: Device(1).uuid, {1}, id="uuid"),
        pytest.param(lambda: Device(1).uuid[:20], {1}, id="prefix"),
        pytest.param(lambda: lambda key: 3, {3}, id="function"),
        pytest.param(lambda: lambda key: Device(2), {2}, id="function-Device"),
        pytest.param(lambda: "auto", {0, 1, 2, 3}, id="auto"),
        pytest.param(lambda: None, {None}, id="None"),
        pytest.param(lambda: "none", {None}, id="none"),
    ],
)
def test_accepted(client: Client, wanted: Callable[[], Any], expected: set[Any]) -> None:
    assert submit_on(client, wanted(), here, pure=False).result(20) in expected


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (1.5, TypeError, 'is an ordinal .* "auto" .* None .* function .* got 1.5 of type float'),
        (True, TypeError, "got True of type bool"),
        (b"1", TypeError, "of type bytes"),
        ([1, 2], TypeError, "got "),
        ({"a": 1}, TypeError, "of type dict"),
        ({1}, TypeError, "of type set"),
        (Odd(), TypeError, "of type Odd"),
        (lambda key: Odd(), TypeError, "of type Odd"),
        (_boom, RuntimeError, "the annotation's function fails"),
        (99, DeviceNotFoundError, "no device 99"),
        ("0,1", DeviceNotFoundError, r"devices=\[0, 1\]"),
        ("banana", DeviceNotFoundError, "A device is an ordinal"),
        ("GPU-00000000-0000-0000-0000-000000000000", DeviceNotFoundError, "has this UUID"),
    ],
)
def test_refused(client: Client, wanted: Any, error: type[Exception], message: str) -> None:
    workers = list(workers_of(client))
    with dask.annotate(device=wanted), pytest.raises(error, match=message):
        client.submit(here, pure=False).result(20)
    assert client.submit(here, pure=False).result(20) in range(4)  # everybody is alive
    assert list(workers_of(client)) == workers
