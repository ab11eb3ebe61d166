"""The package's own calls for a task that needs nothing: their number does not grow unseen.

Time is too noisy for a test. Each call takes about a tenth of a microsecond.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

from distributed import wait

from tests.distributed.devices import with_plugin

_calls: Counter[int] = Counter()  # by thread


def _count(frame: FrameType, event: str, arg: object) -> None:
    module = frame.f_globals.get("__name__", "")
    # The driver is simulated here. Versions of Python differ in the frames of comprehensions.
    if (
        event == "call"
        and module.startswith(("dask_devctx.cuda", "dask_devctx.worker"))
        and not frame.f_code.co_name.startswith("<")
    ):
        _calls[threading.get_ident()] += 1


def count_on_this_thread(on: bool) -> int:
    sys.setprofile(_count if on else None)
    return threading.get_ident()


@with_plugin(devices=[0], tasks_per_device=1)
async def test_a_task_that_needs_nothing_makes_few_calls(
    client: Any, scheduler: Any, worker: Any
) -> None:
    on_loop, on_thread = [], []
    thread = await client.submit(count_on_this_thread, True, pure=False)
    loop = count_on_this_thread(True)
    try:
        for _ in range(8):
            _calls.clear()
            future = client.submit(int, pure=False)
            await wait(future)
            on_loop.append(_calls[loop])
            on_thread.append(_calls[thread])
            future.release()
    finally:
        count_on_this_thread(False)
        await client.submit(count_on_this_thread, False, pure=False)
    # Heartbeats and periodic callbacks come in between: the least of some tasks.
    assert 0 < min(on_loop) <= 54
    assert 0 < min(on_thread) <= 48
