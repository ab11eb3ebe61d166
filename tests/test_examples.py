"""The examples run, at a small size, so that they cannot rot."""

from __future__ import annotations

import re
import runpy
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.traces import checked, slices
from tests.python import ROOT, python

EXAMPLES = ROOT / "examples"
# The options that make an example small.
SMALL = {
    "batch_inference": "--images 64",
    "dataframes": "--partitions 4",
    "hyperparameters": "--models 8",
    "larger_than_memory": "--blocks 7",
    "model_server": "--requests 30",
    "scope_only": "",
    "segment_images": "--images coins cell",
    "several_devices": "--rows 800 --columns-beside 40",
}
VARIABLES = {
    "DASK_DEVCTX__SIMULATED_DEVICES": "2",
    "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",  # workers that start fast
}


def run(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    variables = {**VARIABLES, **how.pop("env", {})}
    return python(*arguments, env=variables, check=False, **how)


def test_the_gallery_has_every_example_with_a_picture() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    for name in SMALL:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150
        assert f"`{name}.py`" in page
    pictures = re.findall(r"\]\((images/[\w.]+)\)", page)
    assert len(pictures) >= len(SMALL)
    assert [one for one in pictures if not (ROOT / "docs" / one).exists()] == []


def test_the_archive_of_the_site_runs(tmp_path: Path) -> None:
    site = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(name="html"))
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["write_examples"](site, None)
    with zipfile.ZipFile(tmp_path / "examples.zip") as archive:
        archive.extractall(tmp_path)
    done = run("-m", "examples", "scope_only", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "pictures").glob("*.png"))


@pytest.mark.parametrize("name", SMALL)
def test_an_example(tmp_path: Path, name: str) -> None:
    out = tmp_path / "new"  # which the example makes
    done = run(str(EXAMPLES / f"{name}.py"), "--out", str(out), *SMALL[name].split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" right")
    pictures = list(out.glob("*.png"))
    assert {picture.read_bytes()[:4] for picture in pictures} == {b"\x89PNG"}
    if name == "larger_than_memory":
        found = re.search(r"24 MiB, room for 16 MiB; (\d+) MiB went to the host", done.stdout)
        assert int(found[1]) >= 8
    if name == "segment_images":
        # It says where to look while it runs, and values that are pinned change the device.
        assert re.search(r"http://\S+/devices\n", done.stdout)
        content = checked(out / "timeline.json")
        names = {event["name"] for event in slices(content, "task")}
        assert {"load", "denoise", "threshold", "label", "measure", "compare"} <= names
        assert slices(content, "copy"), "no copy between devices"


def test_an_example_says_what_is_missing() -> None:
    program = (
        "import sys; sys.modules['pandas'] = None; sys.path.insert(0, 'examples'); "
        "sys.argv = ['dataframes']; import dataframes; dataframes.main()"
    )
    done = run("-c", program)
    assert done.returncode == 2
    assert done.stderr == "this example needs the package pandas: pip install pandas\n"
    done = run("examples/scope_only.py", env={"DASK_DEVCTX__SIMULATED_DEVICES": ""})
    if "no GPU" in done.stderr:  # on a machine without GPUs
        assert done.returncode == 2
        assert done.stderr.startswith("no GPU: set DASK_DEVCTX__SIMULATED_DEVICES=4")
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_all_examples_by_one_command(tmp_path: Path) -> None:
    """It goes on after one that fails: here, a device that no worker has."""
    names = ("hyperparameters", "scope_only")
    done = run(
        *("-m", "examples", "--out", str(tmp_path), *names), env={"DASK_DEVCTX__DEVICES": "[7]"}
    )
    assert done.returncode == 1, done.stderr
    failed, right = (line.split() for line in done.stdout.splitlines()[-2:])
    assert failed[:2] == ["hyperparameters", "FAILED"]
    assert right[:2] == ["scope_only", "right"]
    assert {"cuda:0", "cuda:1"} <= set(right)
    assert "DeviceNotFoundError" in done.stderr
    assert "there are batch_inference, dataframes" in run("-m", "examples", "bogus").stderr
