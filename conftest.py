"""Rules for every test and doctest: the devices it runs on, and the state that it must restore.

The default devices are four simulated ones, also on machines with GPUs, so that ``Device(3)`` in a
doctest means the same everywhere. A test runs on real GPUs only if it asks for the real driver by
name: by ``real`` of the ``backend`` fixture, or by the marker ``gpu``.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

os.environ.setdefault("DASK_DEVCTX__SIMULATED_DEVICES", "4")
os.environ["DASK_DEVCTX__SIMULATED_HOST"] = "test"  # the same UUIDs in each process
# Tests that run at the same time do not take each other's devices.
os.environ["DASK_DEVCTX__LOCK_DIRECTORY"] = os.path.join(
    tempfile.gettempdir(), f"dask-devctx-tests-{os.getpid()}"
)

# As in dask's own tests: its profiler takes time, and reads the frames of threads that run, where
# Python 3.11 may crash (python/cpython#99110).
os.environ["DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"] = "False"

from dask_devctx import driver
from dask_devctx.cuda.scope import open_scopes

# The threads' names of pools that dask keeps as long as the process lives.
PROCESS_WIDE_THREADS = ("Dask-Offload", "Profile", "IO loop", "asyncio_")

_COUNT_GPUS = """
from cuda.bindings import driver
status = driver.cuInit(0)[0]
print(driver.cuDeviceGetCount()[1] if status == 0 else status.name)
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail instead of skipping where a test needs real GPUs that are missing",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(count=2): needs that many real GPUs")
    config.addinivalue_line("markers", "long: takes so long that only `make test-long` runs it")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["DASK_DEVCTX__LOCK_DIRECTORY"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Libraries leave contexts and threads in this process. Other tests run before, without them.
    items.sort(key=lambda item: "tests/gpu/" in item.nodeid)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("gpu"):
        needed = marker.kwargs.get("count", marker.args[0] if marker.args else 2)
        count, reason = real_gpus()
        if count < needed:
            why = f"needs {needed} real GPUs, found {count}: {reason}"
            if item.config.getoption("--require-gpu"):
                pytest.fail(why, pytrace=False)
            pytest.skip(why)


@functools.cache
def real_gpus() -> tuple[int, str]:
    """Return how many GPUs the real driver shows, and its message, from a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, timeout=120
    )
    answer = (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()[-1]
    return (int(answer), "the driver's count") if answer.isdecimal() else (0, answer)


@pytest.fixture(autouse=True)
def all_visible(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated devices are all visible, whichever real ones are."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no context stays current on this thread, no scope open, and no thread alive."""
    threads = set(threading.enumerate())
    yield
    assert open_scopes() == ()
    backend = driver.current_backend()
    assert backend is None or backend.current_context() == 0
    deadline = time.monotonic() + 5
    while left := [
        thread
        for thread in set(threading.enumerate()) - threads
        if not thread.name.startswith(PROCESS_WIDE_THREADS)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
