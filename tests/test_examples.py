"""The examples run, at a small size, so that they cannot rot."""

from __future__ import annotations

import os
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
        str(EXAMPLES / "segment_images.py"), "--out", str(tmp_path), "--images", "coins", "cell"
    )
    assert done.returncode == 0, done.stderr
    assert "DIFFERS" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("same")]
    assert [row[0] for row in rows] == ["coins", "cell"]
    assert all(int(row[1]) > 0 for row in rows)
    for picture in ("segmented.png", "timeline.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_segment_images_reports_a_difference(tmp_path: Path) -> None:
    """A measurement that differs from the run without dask ends the example with status 1."""
    sabotage = (
        "import runpy, sys, numpy as np;"
        f"sys.argv = ['x', '--out', {str(tmp_path)!r}, '--images', 'coins'];"
        f"sys.path.insert(0, {str(EXAMPLES)!r});"
        "import segment_images as s; s.without_dask = lambda image: np.ones((3, 4));"
        "sys.exit(s.main())"
    )
    done = run_example("-c", sabotage)
    assert done.returncode == 1, done.stderr
    assert "DIFFERS" in done.stdout
