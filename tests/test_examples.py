"""The examples run, at a small size, so that they cannot rot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_segment_images(tmp_path: Path) -> None:
    done = run_example(
        str(EXAMPLES / "segment_images.py"),
        "--out",
        str(tmp_path),
        "--images",
        "coins",
        "cell",
        "--seconds",
        "0",
    )
    assert done.returncode == 0, done.stderr
    assert "DIFFERS" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "% " in line]
    assert [row[0] for row in rows] == ["coins", "cell"]
    assert all(int(row[1]) > 0 for row in rows)
    for picture in ("segmented.png", "devices.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    # It says where to look while it runs, and what moved: the assigned images change the device.
    assert re.search(r"http://\S+/devices\n", done.stdout)
    assert "copied in" in done.stdout
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"load", "denoise", "threshold", "label", "measure", "compare"} <= names
    assert any(event["ph"] == "s" for event in events), "no copy between devices"


def test_segment_images_reports_a_difference(tmp_path: Path) -> None:
    """A measurement that differs from the run without dask ends the example with status 1."""
    sabotage = (
        "import runpy, sys, numpy as np;"
        f"sys.argv = ['x', '--out', {str(tmp_path)!r}, '--images', 'coins', '--seconds', '0'];"
        f"sys.path.insert(0, {str(EXAMPLES)!r});"
        "import segment_images as s; s.without_dask = lambda image: np.ones((3, 4));"
        "sys.exit(s.main())"
    )
    done = run_example("-c", sabotage)
    assert done.returncode == 1, done.stderr
    assert "DIFFERS" in done.stdout


def test_several_devices(tmp_path: Path) -> None:
    done = run_example(
        *(str(EXAMPLES / "several_devices.py"), "--rows", "800", "--columns-beside", "40"),
        DASK_DEVCTX__SIMULATED_DEVICES="4",
        DASK_DEVCTX__LOCK_DIRECTORY=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "solved on devices [0, 1] in 60 steps: same" in done.stdout
    assert "40 columns beside it on devices" in done.stdout
