"""The only package that uses undocumented parts of dask and distributed, and the check of them.

All other packages call its functions and classes. Each module covers one place:
:mod:`~dask_devctx.dask_internals.tasks`, :mod:`~dask_devctx.dask_internals.threads`,
:mod:`~dask_devctx.dask_internals.worker`, :mod:`~dask_devctx.dask_internals.scheduler`,
:mod:`~dask_devctx.dask_internals.cluster`, :mod:`~dask_devctx.dask_internals.serialization`,
:mod:`~dask_devctx.dask_internals.graphs`, :mod:`~dask_devctx.dask_internals.shuffles` and
:mod:`~dask_devctx.dask_internals.dashboard`.

A release of dask may rename any of these parts. :func:`check` looks for every name before anything
is changed. A release that lacks a name is refused with one clear error.
"""

from __future__ import annotations

import functools
import logging
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from dask_devctx.dask_internals.logs import ShownAsDasks
from dask_devctx.errors import UnsupportedDaskError

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

logging.getLogger("dask_devctx").addHandler(ShownAsDasks())

# A module, a colon, and the path from there: attributes, [keys], and () for a call.
NAMES: Final = (
    "dask._task_spec:DataNode.value",
    "dask._task_spec:GraphNode.is_coro",
    "dask._task_spec:Task.args",
    "dask._task_spec:Task.func",
    "dask._task_spec:Task.kwargs",
    "dask._task_spec:convert_legacy_graph",
    "dask.blockwise:fuse_roots",
    "dask.blockwise:optimize_blockwise",
    "dask.highlevelgraph:MaterializedLayer",
    "distributed.worker_state_machine:ExecuteFailureEvent",
    "distributed.worker_state_machine:ExecuteSuccessEvent",
    "distributed.worker_state_machine:TaskState.annotations",
    "distributed.worker_state_machine:TaskState.metadata",
    "distributed.worker_state_machine:TaskState.run_spec",
    "distributed.utils:thread_state",
    "distributed.threadpoolexecutor:ThreadPoolExecutor._adjust_thread_count",
    "distributed.threadpoolexecutor:ThreadPoolExecutor()._max_workers",
    "distributed.threadpoolexecutor:ThreadPoolExecutor()._rejoin_list",
    "distributed.threadpoolexecutor:ThreadPoolExecutor()._rejoin_lock",
    "distributed.threadpoolexecutor:ThreadPoolExecutor()._shutdown",
    "distributed.threadpoolexecutor:ThreadPoolExecutor()._shutdown_lock",
    "distributed.threadpoolexecutor:ThreadPoolExecutor()._threads",
    "distributed.threadpoolexecutor:ThreadPoolExecutor()._work_queue",
    "distributed.threadpoolexecutor:thread_state",
    "distributed.core:ConnectionPool.connect",
    "distributed.protocol.core:pickle.loads",
    "distributed.protocol.serialize:Serialized",
    "distributed.shuffle._exceptions:P2PConsistencyError",
    "distributed.shuffle._rechunk:ArrayRechunkRun._get_output_partition",
    "distributed.shuffle._rechunk:ArrayRechunkRun._receive",
    "distributed.shuffle._rechunk:ArrayRechunkRun._shard_partition",
    "distributed.shuffle._rechunk:ArrayRechunkRun.close",
    "distributed.shuffle._rechunk:ArrayRechunkRun.offload",
    "distributed.utils_comm:retry",
    "distributed.worker:Worker.batched_send",
    "distributed.worker:Worker.execute",
    "distributed.worker:get_data_from_worker",
    "distributed.worker:Worker.gather_dep",
    "distributed.worker_state_machine:GatherDepFailureEvent",
    "distributed.worker_state_machine:GatherDepSuccessEvent",
    "distributed.worker_state_machine:WorkerState._handle_event",
    "distributed.worker_state_machine:WorkerState._TRANSITIONS_TABLE",
    "distributed.worker_state_machine:WorkerState._transition_generic_error",
    "distributed.scheduler:Scheduler.check_idle_saturated",
    "distributed.scheduler:Scheduler.coerce_address",
    "distributed.scheduler:Scheduler.coerce_hostname",
    "distributed.scheduler:Scheduler.is_rootish",
    "distributed.scheduler:Scheduler.register_scheduler_plugin",
    "distributed.scheduler:Scheduler.register_worker_plugin",
    "distributed.scheduler:Scheduler.stimulus_queue_slots_maybe_opened",
    "distributed.scheduler:Scheduler.transitions",
    "distributed.scheduler:Scheduler.valid_workers",
    "distributed.scheduler:TaskState.annotations",
    "distributed.scheduler:TaskState.host_restrictions",
    "distributed.scheduler:TaskState.loose_restrictions",
    "distributed.scheduler:TaskState.worker_restrictions",
    "distributed.deploy.spec:SpecCluster.__await__",
    "distributed.deploy.spec:SpecCluster._close",
    "distributed.deploy.spec:SpecCluster._correct_state_internal",
    "distributed.deploy.spec:SpecCluster._new_worker_name",
    "distributed.deploy.spec:SpecCluster._start",
    "distributed.deploy.spec:SpecCluster._update_worker_status",
    "distributed.deploy.cluster:Cluster._update_worker_status",
    "distributed.protocol.serialize:dask_serialize._lookup",
    "distributed.protocol.serialize:dask_deserialize._lookup",
    "distributed.protocol.cuda:cuda_serialize._lookup",
    "distributed.protocol.cuda:cuda_deserialize._lookup",
)
ON_A_WORKER: Final = (
    "_deque_handler",
    "_pending_plugins",
    "executors[default]",
    "executors[offload]",
    "handlers[actor_attribute]",
    "handlers[actor_execute]",
    "handlers[get_data]",
    "memory_manager.memory_limit",
    "handlers[run]",
    "handlers[run_coroutine]",
    "memory_manager.data",
    "metrics",
    "nanny",
    "periodic_callbacks[heartbeat]",
    "state.actors",
    "state.transfer_message_bytes_limit",
    "state.data",
    "stream_handlers[close]",
    "stream_handlers[free-keys]",
    "stream_handlers[compute-task]",
    "stream_handlers[remove-worker]",
)
# For a worker with a memory limit: its data is a zict.Buffer.
ON_SPILLING_DATA: Final = ("fast.n", "slow")
ON_A_SCHEDULER: Final = (
    "handlers",
    "handlers[processing]",
    "handlers[unregister]",
    "host_info",
    "idle_task_count",
    "WORKER_SATURATION",
    "rpc",
    "running",
    "total_memory",
    "stream_handlers[task-erred]",
)

# For a scheduler that shows dask's dashboard: these need Bokeh.
OF_A_DASHBOARD: Final = (
    "distributed.dashboard.components:add_periodic_callback",
    "distributed.dashboard.components.scheduler:env.loader",
    "distributed.dashboard.core:DaskBokehTornado",
    "distributed.dashboard.scheduler:template_variables",
    "distributed.diagnostics.progress_stream:color_of",
)

_STEP = re.compile(r"\.?(\w+)|\[([\w-]+)\]|(\(\))")


@functools.cache
def check() -> None:
    """Check every name that needs no worker and no scheduler; once in each process."""
    for name in NAMES:
        _find_in_module(name)


def check_worker(worker: Worker) -> None:
    """Check every name that is used on a worker; raise as :func:`check` does."""
    from zict import Buffer

    check()
    for way in ON_A_WORKER:
        _find(worker, way, "distributed.Worker")
    if isinstance(worker.data, Buffer):
        for way in ON_SPILLING_DATA:
            _find(worker.data, way, "distributed.Worker.data")


def check_scheduler(scheduler: Scheduler) -> None:
    """Check every name that is used on a scheduler; raise as :func:`check` does."""
    check()
    for way in ON_A_SCHEDULER:
        _find(scheduler, way, "distributed.Scheduler")


def check_dashboard(scheduler: Scheduler) -> None:
    """Check every name that is used of a scheduler's dashboard; raise as :func:`check` does."""
    for name in OF_A_DASHBOARD:
        _find_in_module(name)
    _find(scheduler, "http_application.applications", "distributed.Scheduler")


def unsupported(name: str) -> UnsupportedDaskError:
    """Return the error for a name that is missing."""
    import dask
    import distributed

    try:
        ours = version("dask-devctx")
    except PackageNotFoundError:  # run from its sources
        ours = "unknown"
    return UnsupportedDaskError(name, dask.__version__, distributed.__version__, ours)


def _find_in_module(name: str) -> None:
    module, _, way = name.partition(":")
    try:
        start: object = import_module(module)
    except ImportError as error:
        raise unsupported(name.replace(":", ".")) from error
    _find(start, way, module)


def _find(found: Any, way: str, start: str) -> None:
    for attribute, key, call in _STEP.findall(way):
        try:
            if isinstance(found, type) and attribute:
                found = _of_a_class(found, attribute)
            elif attribute:
                found = getattr(found, attribute)
            elif key:
                found = found[key]
            elif call:
                found = found()
        except (AttributeError, LookupError, TypeError) as error:
            raise unsupported(f"{start}.{way}") from error


def _of_a_class(kind: type, name: str) -> Any:
    """Return an attribute that a class has from dask, not from a base in the standard library."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("dask", "distributed") and name in vars(base):
            return getattr(kind, name)
    raise AttributeError(name)
