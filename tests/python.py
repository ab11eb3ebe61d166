"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def python(
    *arguments: str, check: bool = True, env: Mapping[str, str | None] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python, with more variables or, where one is None, without it; say why it failed."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    wanted = {**os.environ, "PYTHONPATH": paths, **(env or {})}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={name: value for name, value in wanted.items() if value is not None},
        capture_output=True,
        text=True,
        **{"cwd": ROOT, "timeout": 100, **how},
    )
    if check:
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr[-6000:]}"
    return done
