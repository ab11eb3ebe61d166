"""The examples run, at a small size, so that they cannot rot."""

from __future__ import annotations

import os
import pickle
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_devctx.client.report import Report, ReportedDevice, ReportedTask
from tests.distributed.traces import assert_equal, checked, slices

ROOT = Path(__file__).parent.parent
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
# Runs the demo, and keeps the report that its picture shows.
DEMO = """
import pickle, sys
saved = sys.argv.pop(1)
sys.path.insert(0, "examples")
import segment_images
draw = segment_images.lanes
def lanes(report, *others):
    with open(saved, "wb") as file:
        pickle.dump(report, file)
    draw(report, *others)
segment_images.lanes = lanes
sys.exit(segment_images.main())
"""


VARIABLES = {
    "DASK_DEVCTX__SIMULATED_DEVICES": "2",
    "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",  # workers that start fast
}


def python(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | VARIABLES | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_gallery_has_every_example_with_a_picture() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    for name in SMALL:
        path = EXAMPLES / f"{name}.py"
        assert len(path.read_text().splitlines()) < 150
        assert f"`{name}.py`" in page
    pictures = re.findall(r"\]\((images/[\w.]+)\)", page)
    assert len(pictures) >= len(SMALL)
    assert [one for one in pictures if not (ROOT / "docs" / one).exists()] == []


def test_the_archive_of_the_site_runs(tmp_path: Path) -> None:
    site = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(name="html"))
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["write_examples"](site, None)
    with zipfile.ZipFile(tmp_path / "examples.zip") as archive:
        archive.extractall(tmp_path)
    done = python("-m", "examples", "scope_only", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "pictures").glob("*.png"))


@pytest.mark.parametrize("name", SMALL)
def test_an_example(tmp_path: Path, name: str) -> None:
    path, saved = EXAMPLES / f"{name}.py", tmp_path / "report"
    out = tmp_path / "new"  # which the example makes
    program = ["-c", DEMO, str(saved)] if name == "segment_images" else [str(path)]
    done = python(*program, "--out", str(out), *SMALL[name].split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" right")
    pictures = list(out.glob("*.png"))
    assert pictures
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
    if name == "larger_than_memory":
        found = re.search(r"24 MiB, room for 16 MiB; (\d+) MiB went to the host", done.stdout)
        assert found is not None
        assert int(found[1]) >= 8
    if name == "segment_images":
        # It says where to look while it runs, and values that are pinned change the device.
        assert re.search(r"http://\S+/devices\n", done.stdout)
        content = checked(out / "timeline.json")
        names = {event["name"] for event in slices(content, "task")}
        assert {"load", "denoise", "threshold", "label", "measure", "compare"} <= names
        assert slices(content, "copy"), "no copy between devices"
        assert_equal(content, pickle.loads(saved.read_bytes()))


def test_an_example_says_what_is_missing() -> None:
    program = (
        "import sys; sys.modules['pandas'] = None; sys.path.insert(0, 'examples'); "
        "sys.argv = ['dataframes']; import dataframes; dataframes.main()"
    )
    done = python("-c", program)
    assert done.returncode == 2
    assert done.stderr == "this example needs the package pandas: pip install pandas\n"
    done = python("examples/scope_only.py", DASK_DEVCTX__SIMULATED_DEVICES="")
    if "no GPU" in done.stderr:  # on a machine without GPUs
        assert done.returncode == 2
        assert done.stderr.startswith("no GPU: set DASK_DEVCTX__SIMULATED_DEVICES=4")
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_regions_that_differ_are_noticed() -> None:
    program = (
        "import sys; sys.path.insert(0, 'examples'); import segment_images; "
        "print(segment_images.same([[1.0, 2.0, 3.0, 4.0]], 'cell'))"
    )
    assert python("-c", program).stdout == "False\n"


def test_all_examples_by_one_command(tmp_path: Path) -> None:
    """It goes on after one that fails: here, a device that no worker has."""
    names = ("hyperparameters", "scope_only")
    done = python(*("-m", "examples", "--out", str(tmp_path), *names), DASK_DEVCTX__DEVICES="[7]")
    assert done.returncode == 1, done.stderr
    failed, right = (line.split() for line in done.stdout.splitlines()[-2:])
    assert failed[:2] == ["hyperparameters", "FAILED"]
    assert right[:2] == ["scope_only", "right"]
    assert {"cuda:0", "cuda:1"} <= set(right)
    assert "DeviceNotFoundError" in done.stderr
    assert "there are batch_inference, dataframes" in python("-m", "examples", "bogus").stderr


# -- the pictures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of the pictures that a test draws."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    found: list[Any] = []
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: found.append(self))
    return found


def lanes_of(figure: Any) -> dict[str, set[str]]:
    """Return the lanes of a picture from the top, each with the labels of its bars."""
    (axis,) = figure.axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    shown: dict[str, set[str]] = {name: set() for name in names[::-1]}
    for bars in axis.containers:
        for bar in bars:
            if bar.get_width():
                shown[names[round(bar.get_y() + bar.get_height() / 2)]].add(bars.get_label())
    return shown


def test_a_picture_shows_a_task_on_each_of_its_devices(drawn: list[Any], tmp_path: Path) -> None:
    from pictures import lanes

    steps = ("orders", "shuffle-transfer", "shuffle-p2p", "upload", "sums", "largest")
    ran = [
        ReportedTask(n, prefix, f"GPU-{n % 4}", n % 4, 1.0 + n, 2.0 + n, "memory", worker="w",
                     device_ids=(n % 4,))
        for n, prefix in enumerate(steps)
    ]  # fmt: skip
    both = ReportedTask("b", "sums", "GPU-2", 2, 9, 10, "memory", worker="w", device_ids=(2, 3))
    on_none = ReportedTask("c", "orders", None, None, 9, 10, "memory", worker="w")
    found = [ReportedDevice(n, f"GPU-{n}", None, worker="w") for n in (3, 0, 2, 1)]
    lanes(Report([*ran, both], found, without_device=[on_none]), tmp_path / "x.png", steps)
    (figure,) = drawn
    assert lanes_of(figure) == {
        "cuda:0": {"orders", "sums"},
        "cuda:1": {"shuffle-transfer", "largest"},
        "cuda:2": {"shuffle-p2p", "sums"},
        "cuda:3": {"upload", "sums"},
        "no device": {"orders"},
    }
    figure.draw_without_rendering()
    legend = figure.axes[0].get_legend().get_window_extent()
    inside = figure.bbox
    assert inside.x0 <= legend.x0 < legend.x1 <= inside.x1
    assert inside.y0 <= legend.y0 < legend.y1 <= inside.y1


def test_a_picture_orders_the_devices(drawn: list[Any], tmp_path: Path) -> None:
    from larger_than_memory import MIB, draw

    sizes = {"device_memory_limit": 8 * MIB, "memory_held": MIB, "memory_spilled": MIB}
    found = [ReportedDevice(n, f"GPU-{n}", None, **sizes) for n in (3, 0, 2, 1)]
    draw(Report((), found), tmp_path / "x.png")
    (figure,) = drawn
    assert list(lanes_of(figure)) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
