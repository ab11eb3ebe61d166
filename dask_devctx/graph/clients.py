"""What a client says wherever this package is imported after distributed.

Tasks may ask for devices where no worker uses any: nobody may have made a plugin. Gathered values
may be larger than the device on which they arrive.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import dask
from distributed import Client

from dask_devctx.annotations.names import NAMES, about_no_plugin
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, requested_nbytes
from dask_devctx.dask_internals.submits import around_each_call, around_each_gather, in_a_task
from dask_devctx.errors import DeviceMemoryError

_asked: WeakSet[Client] = WeakSet()


@contextmanager
def _asked_whether_heeded(
    client: Client, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Ask the workers for the plugin, once for each client, after a call with an annotation."""
    yield
    named = NAMES & dask.get_annotations().keys()
    if named and client not in _asked and not in_a_task():
        _asked.add(client)
        client.loop.add_callback(_ask, client, min(named))


async def _ask(client: Client, name: str) -> None:
    try:
        if await client.run_on_scheduler(_has_routing):  # which warns by itself
            return
        answers = await client.run(_has_plugin, on_error="ignore")
    except Exception:  # of a client or a scheduler that is closing
        return
    if answers and not any(answers.values()):
        warnings.warn(about_no_plugin(name), stacklevel=1)
    elif not answers:  # there are no workers yet: ask again after the next call
        _asked.discard(client)


def _has_plugin(dask_worker: Any) -> bool:
    return any(type(one).__name__ == "DevicePlugin" for one in dask_worker.plugins.values())


def _has_routing(dask_scheduler: Any) -> bool:
    return "devctx-routing" in dask_scheduler.plugins


# sent by value, to processes without this package too
_has_plugin.__module__ = _has_routing.__module__ = "__main__"


class _Gathering(logging.Filter):
    """Leaves out dask's log of values without room while a client gathers, since that raises."""

    under_way = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (self.under_way and isinstance(error, Exception) and is_out_of_memory(error))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.under_way += 1
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise _no_room(error) from None
        finally:
            self.under_way -= 1


def _no_room(error: Exception) -> DeviceMemoryError:
    device = Device.current() or Device(0)
    why = (
        f"the values arrive on {device} of this process, which has no room for them. Gather fewer "
        "at a time, or copies on the host: client.gather(client.map(to_device, futures, "
        'device="cpu"))'
    )
    status = "CUDA_ERROR_OUT_OF_MEMORY"
    return DeviceMemoryError("client.gather", status, 2, why, requested_nbytes(error))


_steps, _gathering = ExitStack(), _Gathering()
with suppress(AttributeError):  # of a dask without these names, which the plugin refuses
    _steps.enter_context(around_each_call(_asked_whether_heeded))
    _steps.enter_context(around_each_gather(_gathering))
logging.getLogger("distributed.protocol.core").addFilter(_gathering)
