"""The only package that uses undocumented parts of dask and distributed, and the check of them.

All other packages call its functions and classes. A release of dask may rename any of these parts.
So :func:`check` looks for every name before anything is changed, and a release that lacks a name is
refused with one clear error.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable
from importlib import import_module
from logging.handlers import QueueHandler
from typing import TYPE_CHECKING, Any, Final

from dask_devctx.errors import DevctxError

if TYPE_CHECKING:
    from distributed import Scheduler, Worker


# The tests ran with these releases of dask and distributed, the oldest and the newest.
TESTED: Final = ("2025.4.0", "2026.8.0")


class _AsDasks(QueueHandler):
    """Hands lines to the handlers of dask's own, with their errors as text.

    ``client.get_worker_logs()`` has them. They are shown as dask's are, unless logging is set up
    for this package. The frames of an error have values, which would stay as long as the line.
    """

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # handlers are in the place of a queue

    def enqueue(self, record: logging.LogRecord) -> None:
        for kept in logging.getLogger("distributed.worker").handlers:
            kept.handle(record)
        package = logging.getLogger("dask_devctx")
        others = [one for one in package.handlers if isinstance(one, logging.StreamHandler)]
        if not others and not logging.getLogger().handlers:
            logging.getLogger("distributed").callHandlers(record)


logging.getLogger("dask_devctx").addHandler(_AsDasks())

# Where names are, by a module and maybe a class in it: each is a path from there, of attributes,
# [keys], and () for a call.
_BY_OWNER: Final = {
    "dask._task_spec:DataNode.": "value",
    "dask._task_spec:GraphNode.": "is_coro",
    "dask._task_spec:Task.": "args func kwargs",
    "dask.blockwise:": "fuse_roots optimize_blockwise",
    "dask.highlevelgraph:": "MaterializedLayer",
    "distributed.worker_state_machine:": (
        "ExecuteFailureEvent ExecuteSuccessEvent GatherDepFailureEvent GatherDepSuccessEvent "
        "RescheduleEvent SecedeEvent"
    ),
    "distributed.worker_state_machine:TaskState.": "annotations metadata run_spec",
    "distributed.utils:": "thread_state",
    "distributed.utils_comm:": "retry",
    "distributed.threadpoolexecutor:ThreadPoolExecutor.": "_adjust_thread_count",
    "distributed.threadpoolexecutor:ThreadPoolExecutor().": (
        "_max_workers _rejoin_list _rejoin_lock _shutdown _shutdown_lock _threads _work_queue"
    ),
    "distributed.threadpoolexecutor:": "thread_state",
    "distributed.core:ConnectionPool.": "connect",
    "distributed.protocol.core:": "pickle.loads",
    "distributed.protocol.serialize:": "dask_deserialize._lookup dask_serialize._lookup Serialized",
    "distributed.shuffle._exceptions:": "P2PConsistencyError",
    "distributed.shuffle._rechunk:ArrayRechunkRun.": (
        "_receive add_partition barrier close get_output_partition inputs_done offload "
        "raise_if_closed send"
    ),
    "distributed.shuffle._core:": "barrier_key id_from_key",
    "distributed.shuffle._rechunk:": "rechunk_unpack",
    "distributed.shuffle._scheduler_plugin:ShuffleSchedulerPlugin.": "_set_restriction",
    "distributed.shuffle._worker_plugin:ShuffleWorkerPlugin.": (
        "get_or_create_shuffle get_shuffle_run"
    ),
    "distributed.worker:Worker.": "batched_send execute gather_dep handle_stimulus",
    "distributed.worker:": "get_data_from_worker",
    "distributed.worker_state_machine:WorkerState.": (
        "_handle_event _transition_generic_error _TRANSITIONS_TABLE"
    ),
    "distributed.scheduler:Scheduler.": (
        "coerce_address coerce_hostname get_comm_cost is_rootish register_scheduler_plugin "
        "register_worker_plugin send_all transitions valid_workers"
    ),
    "distributed.scheduler:TaskState.": (
        "annotations host_restrictions loose_restrictions processing_on resource_restrictions "
        "worker_restrictions"
    ),
    "distributed.deploy.spec:SpecCluster.": (
        "__await__ _close _correct_state_internal _memory_per_worker _start _threads_per_worker "
        "_update_worker_status"
    ),
    "distributed.deploy.cluster:Cluster.": "_update_worker_status",
    "distributed.protocol.cuda:": "cuda_deserialize._lookup cuda_serialize._lookup",
}
NAMES = tuple(f"{owner}{name}" for owner, names in _BY_OWNER.items() for name in names.split())
ON_A_WORKER, ON_A_SCHEDULER = (
    tuple(names.split())
    for names in (
        "_pending_plugins batched_stream.buffer batched_stream.interval "
        "batched_stream.next_deadline executors[default] executors[offload] "
        "handlers[actor_attribute] handlers[actor_execute] handlers[get_data] handlers[run] "
        "handlers[run_coroutine] memory_manager.data memory_manager.memory_limit metrics nanny "
        "periodic_callbacks[heartbeat] state.actors state.data state.executing state.ready "
        "state.transfer_message_bytes_limit state.waiting stream_handlers[close] "
        "stream_handlers[free-keys] stream_handlers[remove-worker] transfer_outgoing_count",
        "handlers handlers[processing] handlers[unregister] host_info "
        "rpc running stream_comms stream_handlers[task-erred] total_nthreads worker_plugins",
    )
)

_STEP = re.compile(r"\.?(\w+)|\[([\w-]+)\]|(\(\))")


@functools.cache
def check() -> None:
    """Check every name that needs no worker and no scheduler; once in each process."""
    for name in NAMES:
        module, _, way = name.partition(":")
        try:
            start: object = import_module(module)
        except ImportError as error:
            raise unsupported(name.replace(":", ".")) from error
        _find(start, [way], module)


def check_worker(worker: Worker) -> None:
    """Check every name that is used on a worker; raise as :func:`check` does."""
    check()
    _find(worker, ON_A_WORKER, "distributed.Worker")


def check_scheduler(scheduler: Scheduler) -> None:
    """Check every name that is used on a scheduler; raise as :func:`check` does."""
    check()
    _find(scheduler, ON_A_SCHEDULER, "distributed.Scheduler")


def unsupported(name: str) -> DevctxError:
    """Return the error for a name that is missing, which is raised before anything changes."""
    dask, distributed, ours = (
        import_module(one).__version__ for one in ("dask", "distributed", "dask_devctx")
    )
    return DevctxError(
        f"dask-devctx {ours} uses {name}, which is not in dask {dask} and distributed "
        f"{distributed}. Nothing was changed. Install a newer dask-devctx, or a dask and "
        f"distributed that this one was tested with: {' to '.join(TESTED)}"
    )


def _find(start: Any, ways: Iterable[str], name: str) -> None:
    """Follow ways from an object, and raise for the first that leads nowhere."""
    for way in ways:
        found = start
        for attribute, key, _ in _STEP.findall(way):
            try:
                if isinstance(found, type) and attribute:
                    found = _of_a_class(found, attribute)
                elif attribute:
                    found = getattr(found, attribute)
                else:
                    found = found[key] if key else found()
            except (AttributeError, LookupError, TypeError) as error:
                raise unsupported(f"{name}.{way}") from error


def _of_a_class(kind: type, name: str) -> Any:
    """Return an attribute that a class has from dask, not from a base in the standard library."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("dask", "distributed") and name in vars(base):
            return getattr(kind, name)
    raise AttributeError(name)
