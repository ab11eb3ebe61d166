"""What the tasks of these tests do, and clusters for them."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import dask
import numpy as np
from cuda.bindings.driver import CUresult
from distributed import Client, Event, LocalCluster, Worker
from distributed.utils_test import gen_cluster

from dask_devctx import Device, DevicePlugin, LocalDeviceCluster, SimulatedArray, driver
from dask_devctx.config.checks import key_of
from dask_devctx.config.options import SETTINGS, fold_rmm
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.worker.leases.locks import take
from dask_devctx.worker.placement.admission import Admission, Claim


def acquire(found: Sequence[Device], count: int, *, holder: str) -> ExitStack:
    """Take the first ``count`` free devices as another worker does, until this is closed."""
    lease = ExitStack()
    taken = filter(None, (take(device, holder) for device in found))
    for lock in itertools.islice(taken, count):
        lease.callback(lock.close)
    return lease


def claim_of(
    admission: Admission, name: str, *devices: Device, nbytes: int = 0, priority: Any = ()
) -> Claim:
    """A slot on each of some devices."""
    claim = Claim()
    claim.key, claim.devices, claim.share = name, devices, admission.slot
    claim.nbytes, claim.priority = nbytes, priority
    return claim


def submit_on(client: Client, device: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    with dask.annotate(device=device):
        return client.submit(function, *args, **kwargs)


def here(*_: object) -> int | None:
    device = Device.current()
    return None if device is None else device.device_id


def uuid_here(*_: object) -> str | None:
    device = Device.current()
    return None if device is None else device.uuid


def of_worker(dask_worker: Worker) -> list[int]:
    plugin = dask_worker.plugins.get("devctx")  # a worker that closes has removed it
    return [device.device_id for device in plugin.worker_devices] if plugin else []


def make(value: float = 1.0, n: int = 100) -> SimulatedArray:
    return SimulatedArray.asarray(np.full(n, value))


def nap(seconds: float, *_: object) -> SimulatedArray:
    time.sleep(seconds)
    return SimulatedArray((100, 100))


def fail() -> None:
    raise ZeroDivisionError


def blocks(name: str) -> int | None:
    Event(f"{name}-started").set()
    Event("go-on").wait()
    return here()


def work_is_pending(machine: SimulatedMachine) -> list[bool]:
    """Let no event be reached until the list's one item is set to False."""
    pending = [True]
    status = CUresult.CUDA_ERROR_NOT_READY
    machine.faults.inject("cuEventQuery", status, times=10**6, when=lambda event: pending[0])
    return pending


def current_context() -> int:
    return driver.backend().current_context()


def plugin_with(kind: Any = DevicePlugin, **given: Any) -> Any:
    """Return a plugin or a cluster; some options are configuration, and RMM's are parts of one."""
    given = fold_rmm(given)
    settings = {f"devctx.{key_of(name)}": given.pop(name) for name in {*SETTINGS} & given.keys()}
    with dask.config.set(settings):
        return kind(**given)


# The parameters of a test that are workers of its cluster, beside ``*workers``.
_WORKERS = ("worker", "one", "two", "other", "first", "second", "a", "b", "c")


def on_cluster(
    *nthreads: int, plugin: dict[str, Any] | None = None, **how: Any
) -> Callable[[Any], Any]:
    """A test on a cluster in this process; afterwards no worker's thread has a context."""

    def decorate(test: Any) -> Any:
        wanted = inspect.signature(test).parameters
        named = [name for name in wanted if name in _WORKERS]
        rest = any(each.kind is each.VAR_POSITIONAL for each in wanted.values())
        given = {"client", "scheduler", "workers", *named}

        async def run(client: Any, scheduler: Any, *workers: Any, **fixtures: Any) -> None:
            if plugin is not None:
                await client.register_plugin(DevicePlugin(**plugin))
            there = {"client": client, "scheduler": scheduler}
            there.update(zip(named, workers, strict=False))
            ours = [there[name] for name in wanted if name in there]
            await test(*ours, *(workers[len(named) :] if rest else ()), **fixtures)
            if plugin is not None:
                assert current_context() == 0, "a context was left on the event loop's thread"
                for worker in workers:
                    assert contexts_left(worker) == {}

        functools.update_wrapper(run, test)
        places = [f"_{n}" for n in range(2 + len(nthreads))]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in places),
                *(each for name, each in wanted.items() if name not in given),
            ]
        )
        workers = [("127.0.0.1", n) for n in nthreads]
        return gen_cluster(**{"client": True, "nthreads": workers, "timeout": 60, **how})(run)

    return decorate


def with_plugin(*nthreads: int, **plugin_kwargs: Any) -> Callable[[Any], Any]:
    """A test on a cluster whose workers have the plugin; ``on_cluster`` says what it is given."""
    return on_cluster(*nthreads or (16,), plugin=plugin_kwargs)


@contextmanager
def started(kind: type[LocalCluster] = LocalDeviceCluster, **how: Any) -> Iterator[Client]:
    """A cluster, by default of this process, and its client."""
    how = {"processes": False, "dashboard_address": ":0", **how}
    with kind(**how) as cluster, Client(cluster) as client:
        yield client


def contexts_left(worker: Worker) -> dict[str, int]:
    """Return the threads of a worker's pools that have a current context while idle."""
    left: dict[str, int] = {}
    lock = threading.Lock()

    def ask() -> None:
        with lock:
            if current_context():
                left[threading.current_thread().name] = current_context()

    for executor in worker.executors.values():
        threads = len(getattr(executor, "_threads", ()))
        together = threading.Barrier(threads) if threads else None

        def probe(together: threading.Barrier | None = together) -> None:
            together.wait(20)  # so that each thread takes one
            ask()

        for future in [executor.submit(probe) for _ in range(threads)]:
            future.result(30)
    return left


def plugin_threads() -> list[str]:
    """The names of this process's threads that the plugin has started."""
    return [t.name for t in threading.enumerate() if t.name.startswith("devctx")]


def worker_with(workers: Iterable[Worker], ordinal: int) -> Worker:
    """The one of the workers that uses a device; those that have closed use none."""
    (found,) = (
        worker
        for worker in workers
        if (plugin := worker.plugins.get("devctx")) and Device(ordinal) in plugin.worker_devices
    )
    return found


def workers_of(client: Client) -> dict[str, Any]:
    """The workers of a cluster; `client.scheduler_info()` may lack them after a refresh."""
    return dict(client.sync(client.scheduler.identity, n_workers=-1)["workers"])
