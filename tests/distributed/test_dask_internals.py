"""The undocumented names of dask and distributed: each exists, and is of the expected kind.

Where a release of dask takes a name away, all of the package says so before it changes anything.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import Any

import dask
import pytest
from distributed import get_worker, wait
from distributed.utils_test import async_poll_for

import dask_devctx
from dask_devctx import DevctxError, DevicePlugin, DeviceRouting, dask_internals
from dask_devctx.dask_internals import ON_A_SCHEDULER, ON_A_WORKER
from dask_devctx.dask_internals.worker import metric
from tests.distributed.changes import changes_of
from tests.distributed.devices import on_cluster

PACKAGE = Path(dask_devctx.__file__).parent


# -- each name that is missing


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    dask_internals.check.cache_clear()
    yield
    dask_internals.check.cache_clear()


def take_away(patch: pytest.MonkeyPatch, start: Any, way: str) -> None:
    """Take away what a way leads to, as if dask had renamed it."""
    *steps, (attribute, key, _) = dask_internals._STEP.findall(way)
    made: Any = None
    for step, entry, call in steps:
        if call:
            made = start
        elif not made:
            start = getattr(start, step) if step else start[entry]
    if made:  # its objects have it from their constructor
        init = made.__init__

        def without(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            delattr(self, attribute)

        patch.setattr(made, "__init__", without)
    elif key:
        patch.delitem(start, key)
    elif isinstance(start, type):
        for base in start.__mro__:
            of_dask = base.__module__.startswith(("dask.", "distributed."))
            if of_dask and attribute in vars(base):
                patch.delattr(base, attribute)
    else:
        patch.delattr(start, attribute)


def parts(name: str) -> tuple[Any, str]:
    module, _, way = name.partition(":")
    return import_module(module), way


def test_every_name_is_there() -> None:
    dask_internals.check()


ON_THEM = [
    *(("Worker", way) for way in ON_A_WORKER),
    *(("Scheduler", way) for way in ON_A_SCHEDULER),
]


@on_cluster(2)
async def test_without_a_name_nothing_is_changed(client: Any, scheduler: Any, worker: Any) -> None:
    plugin, routing = DevicePlugin(), DeviceRouting()
    # Nothing of these waits before it raises, so that dask itself does not run meanwhile.
    makers: dict[str, Callable[[], object]] = {
        "Client": DevicePlugin,
        "Worker": lambda: plugin.setup(worker).send(None),
        "Scheduler": lambda: routing.start(scheduler).send(None),
    }
    changes, starts = changes_of(worker), {"Worker": worker, "Scheduler": scheduler}
    handlers, config = dict(scheduler.handlers), dict(dask.config.config)
    missing = [(name, [*makers], *parts(name)) for name in dask_internals.NAMES]
    missing += [(f"distributed.{kind}.{way}", [kind], starts[kind], way) for kind, way in ON_THEM]
    for number, (name, kinds, start, way) in enumerate(missing, 1):
        dask_internals.check.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            take_away(patch, start, way)
            for kind in kinds:
                with pytest.raises(DevctxError) as error:
                    makers[kind]()
                said = f"uses {name.replace(':', '.')}, which is not in dask {dask.__version__} "
                assert said in str(error.value)
        if number % 10 == 0 or number == len(missing):  # it looks through the whole heap
            assert changes() == {}, f"{name}, or one of the nine before it"
        assert scheduler.handlers == handlers, name
        assert dask.config.config == config, name


def test_arrays_without_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from dask.array import backends

    from dask_devctx.dask_internals.graphs import count_elements_on_device

    monkeypatch.delattr(backends, "_numel_arraylike")
    with pytest.raises(DevctxError, match="_numel_arraylike"):
        count_elements_on_device(type("Array", (), {}))


# -- nobody else uses them

TABLES = (*dask_internals.NAMES, *ON_A_WORKER, *ON_A_SCHEDULER)
STEPS = {step for way in TABLES for step in re.findall(r"\w+", way.rpartition(":")[2])}
PRIVATE = {step for step in STEPS if re.match("_[a-z]", step)} - {"_max_workers"}
MODULES = (
    "dask._task_spec",
    "dask.blockwise",
    "distributed.threadpoolexecutor",
    "distributed.deploy.spec",
    "distributed.worker_state_machine",
    "zict",
)
# The names of variables that hold an object of dask's.
DASKS = {"worker", "scheduler", "client", "nanny", "state", "ts", "ws", "cluster", "comm"}


def of_dask(node: ast.Attribute) -> bool:
    """Return whether this is ``worker._name``, ``self._worker._name`` or the like."""
    if not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    return ast.unparse(node.value).rpartition(".")[2].strip("_") in DASKS


def uses(path: Path) -> Iterator[str]:
    """Yield the private names that a module uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and (node.attr in PRIVATE or of_dask(node)):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name in PRIVATE)
            if node.module in MODULES:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def test_no_other_module_uses_them() -> None:
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if PACKAGE / "dask_internals" in path.parents:
            continue
        from_the_door = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and "dask_internals" in (node.module or "")
            for alias in node.names
        }
        if found := {use for use in uses(path) if use not in from_the_door}:
            wrong[str(path.relative_to(PACKAGE))] = found
    assert not wrong, "let dask_internals do it"


# -- what each of them does, where no other test says so


def _fails() -> weakref.ref[set[int]]:
    value: set[int] = set()
    try:
        raise ValueError(f"about {type(value).__name__}")
    except ValueError:
        logging.getLogger("dask_devctx.test").warning("it %s", "failed", exc_info=True)
    return weakref.ref(value)


@on_cluster(1)
async def test_a_workers_log_keeps_lines_and_no_values(client: Any, worker: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:  # pytest keeps the lines, too
        patch.setattr(logging.getLogger("dask_devctx"), "propagate", False)
        assert _fails()() is None
    logs = await client.get_worker_logs()
    (line,) = [line for _, line in logs[worker.address] if "dask_devctx.test" in line]
    assert "WARNING - it failed\nTraceback" in line
    assert line.endswith("ValueError: about set")


@on_cluster(1)
async def test_a_metric_gives_dasks_own_its_place_back(client: Any, worker: Any) -> None:
    own = worker.metrics = {**worker.metrics, "rmm": lambda worker: 1}
    with metric(worker, "rmm", lambda worker: 2):
        assert worker.metrics["rmm"](worker) == 2
    assert worker.metrics == own


@on_cluster(1, plugin={})
async def test_a_plugin_that_dask_removed_ends_when_another_starts(
    client: Any, scheduler: Any
) -> None:
    await client.unregister_scheduler_plugin("devctx-routing")
    await client.register_plugin(DevicePlugin())
    assert "send_all" in vars(scheduler)
    await client.unregister_worker_plugin("devctx")
    await async_poll_for(lambda: "send_all" not in vars(scheduler), timeout=10)


@pytest.mark.parametrize(("inputs", "most"), [([], 16), ([1], 2)])
@on_cluster(8, plugin={"devices": [0]})
async def test_a_group_with_an_input_is_compared_with_the_slots(
    client: Any, scheduler: Any, worker: Any, inputs: list[int], most: int
) -> None:
    given = await client.scatter(inputs) if inputs else []
    for n in (most, most + 1):
        futures = [client.submit(max, one, 0, *given, key=(f"of {n}", one)) for one in range(n)]
        await wait(futures)
        found = scheduler.is_rootish(scheduler.tasks[futures[0].key])
        assert (found, scheduler.total_nthreads) == (n > most, 8)


@on_cluster(8, 8)
async def test_few_tasks_are_spread_evenly(client: Any, scheduler: Any, a: Any, b: Any) -> None:
    """Also where one worker takes longer: what uses their results needs all devices."""
    await client.register_plugin(DevicePlugin(devices_per_worker=1))
    slow = a.address
    futures = client.map(lambda _: sleep(0.005 * (get_worker().address == slow)), range(16))
    await wait(futures)
    assert [len(scheduler.workers[one.address].has_what) for one in (a, b)] == [8, 8]


@on_cluster(8, 8, plugin={"devices_per_worker": 1})
async def test_the_slots_are_those_of_the_workers_that_are_there(
    client: Any, scheduler: Any, a: Any, b: Any
) -> None:
    await b.close()
    futures = client.map(sleep, [0.5] * 2, pure=False)
    while len(scheduler.tasks) < 2:
        await asyncio.sleep(0.01)
    assert not scheduler.is_rootish(scheduler.tasks[futures[0].key])
