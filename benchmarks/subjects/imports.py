"""The cost of importing ``Device``, beside the bindings that it uses.

Each repetition is a new process. All times contain that of a process that imports nothing, which
has a row of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.case import Case, Contender, Size

TITLE = "importing Device"


def cases(size: Size) -> Iterator[Case]:
    yield Case(
        name="a fresh process",
        per="process",
        target=None if size.tiny else 1.2,
        single=True,
        contenders=[
            Contender(
                "from dask_devctx import Device", _process("from dask_devctx import Device"), "ours"
            ),
            Contender(
                "import cuda.bindings.driver",
                _process("import cuda.bindings.driver"),
                remark="the first scope imports these too",
            ),
            Contender("nothing", _process("pass"), "floor", remark="Python's own start"),
            Contender(
                "Device and its first scope's imports",
                _process("from dask_devctx import Device; import cuda.bindings.driver, pynvml"),
                "variant",
                remark="no scope is entered",
            ),
        ],
    )


def _process(program: str) -> Callable[[int], float]:
    def run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            subprocess.run([sys.executable, "-c", program], check=True)
        return time.perf_counter() - started

    return run
