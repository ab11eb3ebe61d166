"""Mistakes of a first day: each has a message with the reason and the remedy."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client

from dask_devctx import Device, DevicesInUseError, LocalDeviceCluster, SimulatedArray, to_device

START = "LocalDeviceCluster(n_workers=1, dashboard_address=':0')"
GUARD = 'if __name__ == "__main__":'


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text("from dask_devctx import LocalDeviceCluster\n" + text)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    "text",
    [f"cluster = {START}\n", f"def main():\n    {START}\n\nmain()\n", f"with {START}:\n    pass\n"],
    ids=["at once", "in a function", "in a with"],
)
def test_a_script_that_starts_a_cluster_while_it_is_imported(tmp_path, text):
    done = run_script(tmp_path / "job.py", text)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert "job.py, line" in last
    assert "a process that imports the script" in last
    assert last.endswith(GUARD)
    assert "distributed.nanny" not in done.stderr  # no process was started


def test_a_script_with_the_guard_starts(tmp_path):
    done = run_script(tmp_path / "job.py", f"{GUARD}\n    {START}.close()\n    print('closed')\n")
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.parametrize("guard", [f"{GUARD}\n    ", ""], ids=["guard", "no guard"])
def test_a_program_from_standard_input(guard: str) -> None:
    """The workers' processes cannot import it, with a guard either."""
    text = f"from dask_devctx import LocalDeviceCluster\n{guard}{START}\n"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-"], input=text, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: the main program comes from <stdin>, which is no file")
    assert "Save it in a file" in last
    assert "distributed.nanny" not in done.stderr  # no process was started


def test_a_script_that_ran_as_another_path_is_found(tmp_path: Path) -> None:
    """As IPython runs it: its code has the path as it was typed."""
    (tmp_path / "job.py").write_text(f"from dask_devctx import LocalDeviceCluster\n{START}\n")
    program = (
        "import sys; main = sys.modules['__main__']; main.__file__ = sys.argv[1]\n"
        "exec(compile(open('job.py').read(), 'job.py', 'exec'), vars(main))\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tmp_path / "job.py")]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "job.py, line 2, starts a cluster" in done.stderr.strip().splitlines()[-1]
    assert "distributed.nanny" not in done.stderr


def test_a_notebook_cell_that_runs_twice(capfd):
    one = {"n_workers": 1, "devices": [0], "dashboard_address": ":0"}
    with LocalDeviceCluster(**one):
        start = time.monotonic()
        with pytest.raises(DevicesInUseError) as caught:
            LocalDeviceCluster(**one)
        assert time.monotonic() - start < 1
    assert capfd.readouterr().err == "", "the exception has the text, and no worker was started"
    assert "cuda:0 is held by worker 0 of tcp" in str(caught.value)
    assert "cluster.close(), or client.shutdown()" in str(caught.value)


def test_functions_of_dask_array_that_need_host_arrays():
    da = pytest.importorskip("dask.array")
    with (
        LocalDeviceCluster(processes=False, dashboard_address=":0") as cluster,
        Client(cluster),
        dask.annotate(device=0),
        Device(0),
    ):
        host = da.from_array(np.array([3.0, 1.0, 1.0, 2.0]), chunks=2)
        x = host.map_blocks(SimulatedArray.asarray, meta=SimulatedArray(0))
        middle = da.percentile(host, 50).compute().tolist()
        remedy = r"x\.map_blocks\(lambda block: block\.get\(\)\)"
        refusal = None
        try:
            found = da.percentile(x, 50).compute()
        except TypeError as error:  # newer releases of dask give NumPy arrays of ranks
            refusal = str(error)
        if refusal is not None:
            assert re.search(remedy, refusal)
        else:
            assert np.asarray(to_device(found, "cpu")).tolist() == middle
        with pytest.raises(TypeError, match=remedy):
            da.unique(x).compute()
        back = x.map_blocks(lambda block: block.get(), meta=np.empty(0))
        assert da.unique(back).compute().tolist() == [1.0, 2.0, 3.0]


def test_simulated_arrays_without_numpy():
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from dask_devctx import Device\n"
        "with Device(1): pass\n"
        "from dask_devctx import SimulatedArray\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingPackageError: SimulatedArray needs the package numpy" in last
    assert "pip install '.[simulated]'" in last


def _starts_a_process() -> None:
    multiprocessing.get_context("spawn").Process(target=print).start()


def _adds_in_place(x: SimulatedArray) -> None:
    x += 1


def _writes_in_place(x: SimulatedArray) -> None:
    x[0] = 1


async def _adds_later(x: SimulatedArray) -> None:
    _adds_in_place(x)


def test_errors_of_python_and_numpy_have_a_note_with_the_remedy() -> None:
    with (
        LocalDeviceCluster(n_workers=1, devices=[0, 1], dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        with dask.annotate(device=1):
            x = client.submit(SimulatedArray, (3,), pure=False)
        with dask.annotate(device=0):
            process = client.submit(_starts_a_process)
            in_place = [
                client.submit(one, x) for one in (_adds_in_place, _writes_in_place, _adds_later)
            ]
        error = process.exception(timeout=30)
        assert str(error) == "daemonic processes are not allowed to have children"
        assert "distributed.worker.daemon" in error.__notes__[0]
        for future in in_place:
            error = future.exception(timeout=30)
            assert isinstance(error, ValueError)
            assert "read-only" in str(error)
            (note,) = error.__notes__
            assert "to_device(x, Device.current(), copy=True)" in note
