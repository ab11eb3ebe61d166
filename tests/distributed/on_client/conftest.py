"""Clusters here start their workers from a process that has imported dask.

Such workers do not see variables of the environment that a test sets; dask's configuration reaches
them. The tests of the command line and the examples start workers as users do.
"""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest


@pytest.fixture(autouse=True)
def workers_from_a_prepared_process() -> Iterator[None]:
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        yield
