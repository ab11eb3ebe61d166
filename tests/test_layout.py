"""The layout's rules: few entries at the top, small modules, rooms that need only what they say."""

from __future__ import annotations

import re
from subprocess import PIPE, run

import pytest

from dask_devctx.transfer import libraries
from tests.gpu.kinds import KINDS
from tests.python import ROOT, python

PACKAGE = ROOT / "dask_devctx"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

AT_THE_TOP = 16
LINES = 340
# One idea each, of which no part can stand alone.
LONGER = {
    "cuda/context.py": 360,  # what every context has, and the primary one
    "errors.py": 370,  # the tree of errors: read one by one
    "simulated_array.py": 440,
    "worker/values/spill.py": 480,  # what leaves and what comes back, of one account
}


def test_few_entries_at_the_top() -> None:
    entries = {module.partition("/")[0] for module in MODULES}
    assert len(entries) <= AT_THE_TOP, f"a new module belongs into a room of {sorted(entries)}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_small(module: str) -> None:
    lines = len((PACKAGE / module).read_text().splitlines())
    assert lines <= LONGER.get(module, LINES), f"{module} has {lines} lines: split it by ideas"


def test_ci_names_only_tests_that_exist() -> None:
    """pytest runs nothing at all where one of the files that it was given is not there."""
    words = re.findall(r"^ +(tests/\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert words
    named = run(["bash", "-c", f"echo {' '.join(words)}"], text=True, stdout=PIPE, check=True)
    assert not [path for path in named.stdout.split() if not (ROOT / path).exists()]


def test_a_library_is_in_the_table_and_among_the_kinds_of_values() -> None:
    names = {path.rpartition(".")[2] for path in libraries.MODULES.values()}
    modules = {path.stem for path in (PACKAGE / "transfer/libraries").glob("[!_]*.py")}
    assert modules == names - {"simulated_array"}, "MODULES names other modules than there are"
    kinds = {name.partition(" ")[0] for name in KINDS}
    without = {"cudf", "cupyx", "rmm"}  # a stand-in tests it; among CuPy's kinds; only bytes
    assert modules - kinds == without, "tests/gpu/kinds.py has no value of a library"


def test_the_package_itself_needs_no_dask() -> None:
    done = python("-c", "import sys, dask_devctx; print(*sys.modules)")
    assert not {"dask", "distributed", "numpy", "yaml"} & {*done.stdout.split()}


def test_a_worker_needs_no_numpy() -> None:
    python("-c", "import sys; sys.modules['numpy'] = None; import dask_devctx.worker.extension")
