"""Run the tests that dask-cuda's wheel ships for its cluster, with ``LocalDeviceCluster``.

``python -m tests.gpu.dask_cudas_tests`` on a machine with two GPUs and dask-cuda, RMM and
distributed-ucxx; arguments are pytest's. With ``--simulated`` it runs on simulated devices and with
the stand-ins of ``tests/standins``. The file is read where it is installed. Two names in it mean
something else here: ``LocalCUDACluster`` is ours, and ``get_cluster_configuration``, which looks at
dask-cuda's own objects on a worker, asks ours, as ``dask devctx config`` does.

It ends with status 1 if a test fails that ``EXPECTED_TO_FAIL`` does not name, or if fewer than
``LEAST`` pass.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LEAST = 26
LEAST_SIMULATED = 22  # where nothing is skipped but tests of UCX
_NO_ROTATION = (
    "the variable of a worker's process is not rotated: numbers mean the same in all workers"
)
_NOT_SHARED = (
    "dask-cuda's CUDAWorker adds a worker for each GPU to a cluster whose worker has them all, and "
    "no two processes use the same GPU unless shared=True"
)
EXPECTED_TO_FAIL = {
    "test_local_cuda_cluster": _NO_ROTATION,
    "test_no_memory_limits_cudaworker": _NOT_SHARED,
    "test_cluster_worker": _NOT_SHARED,
    "test_with_subset_of_cuda_visible_devices": (
        "it names four devices of which two are missing, and a cluster refuses these"
    ),
}
EXPECTED_TO_FAIL_SIMULATED = {
    "test_worker_fraction_limits": "dask-cuda asks NVML in a worker's process, without simulation"
}
# dask-cuda's names of sizes in its own plugin.
_SIZES = {
    "initial_pool_size": "rmm_pool_size",
    "maximum_pool_size": "rmm_maximum_pool_size",
    "release_threshold": "rmm_release_threshold",
}


def configuration_in_their_words(client: Any) -> Any:
    """Return the configuration of the first worker, by the keys of dask-cuda's function."""
    from dask_devctx.cli.configuration import cluster_configuration

    def translated(found: dict[str, Any]) -> dict[str, Any]:
        worker = next(iter(found["workers"].values()))
        device = next(iter(worker["devctx"]["devices"].values()))
        return {
            "[plugin] RMMSetup": {theirs: device[ours] for theirs, ours in _SIZES.items()},
            "device-memory-limit": device["device_memory_limit"],
            "memory_limit": worker["memory_limit"],
            "protocol": found["scheduler"]["protocol"],
        }

    async def awaited() -> dict[str, Any]:
        return translated(await cluster_configuration(client))

    return awaited() if client.asynchronous else translated(cluster_configuration(client))


class Replaced:
    """A plugin of pytest: the names in their module, and the count of outcomes."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import dask_cuda.utils

        from dask_devctx import LocalDeviceCluster

        dask_cuda.utils.get_cluster_configuration = configuration_in_their_words
        for item in items:
            item.module.LocalCUDACluster = LocalDeviceCluster
            item.module.get_cluster_configuration = configuration_in_their_words

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.outcomes[name] += 1
            if name == "failed":
                self.failed.append(report.nodeid.rpartition("::")[2])


def simulate() -> None:
    """Let dask-cuda see two simulated devices, and the stand-ins in the place of libraries."""
    os.environ.setdefault("DASK_DEVCTX__SIMULATED_DEVICES", "2")
    # These two keep the module itself.
    import distributed.diagnostics.nvml  # noqa: F401

    import dask_devctx.cuda.discovery.nvml  # noqa: F401
    from dask_devctx import driver

    sys.modules["pynvml"] = driver.backend().nvml
    sys.path.insert(0, str(ROOT / "tests" / "standins"))


def main(arguments: list[str], locks: str) -> int:
    os.environ["DASK_DEVCTX__LOCK_DIRECTORY"] = locks  # other tests use the GPUs, too
    least, expected = LEAST, EXPECTED_TO_FAIL
    if "--simulated" in arguments:
        arguments.remove("--simulated")
        least, expected = LEAST_SIMULATED, expected | EXPECTED_TO_FAIL_SIMULATED
        simulate()
    spec = find_spec("dask_cuda")
    if spec is None or spec.origin is None:
        sys.exit("dask-cuda is not installed: pip install dask-cuda")
    tests = Path(spec.origin).parent / "tests" / "test_local_cuda_cluster.py"
    replaced = Replaced()
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", locks, "-rfExX"]
    # Not the project's conftest.py, which simulates devices.
    options += ["--confcutdir", str(tests.parent)]
    pytest.main([str(tests), *options, *arguments], plugins=[replaced])
    print(f"\n{dict(replaced.outcomes)}")
    unexpected = [name for name in replaced.failed if name not in expected]
    for name in replaced.failed:
        print(f"failed: {name}: {expected.get(name, 'NOT EXPECTED')}")
    return int(bool(unexpected) or replaced.outcomes["passed"] < least)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        status = main(sys.argv[1:], directory)
    sys.exit(status)
