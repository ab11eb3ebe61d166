"""Runs distributed's own tests without and with the plugin, and compares their outcomes.

Run it with ``make upstream``. distributed's tests are in its repository, not in its wheels: give a
checkout of a release by ``--source``, or let this clone one with git. They run in the environment
of this Python, with the checkout's distributed, so dask must be of the same release.

A test that fails only with the plugin runs again, alone and both ways. What still differs has a
reason in :data:`REASONS`, or is an error here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = "https://github.com/dask/distributed"
# docs/how-it-works.md has the same list.
REASONS = {
    "test_Executor": "a task runs on its device's threads, not on the worker's own executor",
    "test_executor_offload": "a task runs on its device's threads, not on another executor",
    "test_executor_inherit_threadname_from_worker": "a device's threads have the device's name",
    "test_worker_client_rejoins": "a task rejoins the threads of its device",
    "test_new_metrics_during_heartbeat": "the connection to the scheduler is open already: dask's "
    "own second heartbeat yields as often",
    "test_remove_with_client": "a worker has a further plugin",
    "test_silent_startup": "a worker warns that two threads are too few",
    "test_Client_twice": "a second cluster on the same machine needs devices of its own",
}
DATA_TYPES = """
test_dict_data_if_no_spill_to_disk test_worker_data_callable_kwargs test_manual_evict_proto
test_worker_data_callable_local_directory test_worker_data_callable_local_directory_kwargs
test_override_data_worker test_override_data_nanny test_override_data_vs_memory_monitor
test_avoid_memory_monitor_if_zero_limit_worker test_avoid_memory_monitor_if_zero_limit_nanny
test_memory_limit_none
"""
REASONS |= dict.fromkeys(
    DATA_TYPES.split(), "a mapping of this package holds values that may leave their devices"
)
NAMES = """
scheduler active_memory_manager reschedule semaphore queues locks events variable client
client_executor worker_client worker actor cancelled_state failed_workers nanny spans event_logging
threadpoolexecutor steal resources priorities worker_memory worker_metrics spill stress multi_locks
as_completed
"""
MODULES = [f"tests/test_{name}.py" for name in NAMES.split()]
MODULES += ["deploy/tests", "shuffle/tests", "diagnostics/tests/test_worker_plugin.py"]
PLUGIN = {
    "DASK_DISTRIBUTED__WORKER__PRELOAD": '["dask_devctx"]',
    "DASK_DEVCTX__SIMULATED_DEVICES": "4",
    "DASK_DEVCTX__SHARED": "true",  # some tests start twenty workers
    "DASK_DEVCTX__SIMULATED_HOST": "upstream",
}


def failures(source: Path, tests: Sequence[str], env: Mapping[str, str]) -> tuple[set[str], int]:
    """Return the tests that failed, and how many ran."""
    here = str(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        own = {"DASK_DEVCTX__LOCK_DIRECTORY": f"{place}/locks"} if env else {}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "--override-ini", "addopts="),
                *("-p", "no:asyncio", "-p", "no:cacheprovider", "--timeout", "120"),
                *("--timeout-method", "signal", f"--junitxml={report}", *tests),
                # its marker `flaky` is of a plugin that need not be installed
                *("-W", "ignore::pytest.PytestUnknownMarkWarning"),
            ],
            cwd=source,
            env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{here}", **env, **own},
            stdout=subprocess.PIPE,
            text=True,
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
    assert done.returncode in (0, 1), f"pytest could not run {tests}: {done.stdout}"
    failed = {
        id_of(source, case.get("classname", ""), case.get("name", ""))
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    return failed, len(cases)


def id_of(source: Path, owner: str, name: str) -> str:
    """Return a test's id for pytest; its owner is a module, or a class in a module."""
    parts, inner = owner.split("."), [name]
    while len(parts) > 1 and not source.joinpath(*parts).with_suffix(".py").exists():
        inner.insert(0, parts.pop())
    return "::".join(["/".join(parts) + ".py", *inner])


def differing(source: Path, module: str) -> set[str]:
    """Return the tests of a module that fail with the plugin only, each time."""
    without, count = failures(source, [f"distributed/{module}"], {})
    with_it, _ = failures(source, [f"distributed/{module}"], PLUGIN)
    left = with_it - without
    for _ in range(2):  # twice more
        if left:
            left &= failures(source, sorted(left), PLUGIN)[0]
        if left:
            left -= failures(source, sorted(left), {})[0]
    print(f"{module}: {count} tests, {len(without)} fail without, {len(with_it)} with the plugin")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--source", type=Path, help="a checkout of distributed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        source = arguments.source
        if source is None:
            source, tag = Path(place, "distributed"), version("distributed")
            clone = ["git", "clone", "--depth", "1", "--branch", tag, REPOSITORY, str(source)]
            subprocess.run(clone, check=True)
        found = {
            test for module in arguments.modules for test in differing(source.absolute(), module)
        }
    reasons = {test: REASONS.get(test.rpartition("::")[2].partition("[")[0]) for test in found}
    for test, reason in sorted(reasons.items()):
        print(f"{test}: {reason or 'fails only with the plugin'}")
    return int(None in reasons.values())


if __name__ == "__main__":
    sys.exit(main())
