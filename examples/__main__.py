"""Run all examples and show a table: ``python -m examples``, beside this folder.

``python -m examples NAME`` shows all that one of them says. On a machine without GPUs, they run on
four simulated devices. Pictures go to the folder of ``--out``. An example that lacks a package says
so. The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dask_devctx import DriverUnavailableError, devices, driver

HERE = Path(__file__).parent
EXAMPLES = sorted(path.stem for path in HERE.glob("*.py") if "def main(" in path.read_text())
EXAMPLES.remove("__main__")
# Status 2 says that something is missing.
RESULTS = {0: "right", 2: "skipped"}


def run(name: str, out: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(out)]
    return subprocess.run(command, text=True, check=False, **options)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(EXAMPLES)}")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="for the pictures")
    options = parser.parse_args()
    if unknown := set(options.names) - set(EXAMPLES):
        parser.error(f"no example {', '.join(sorted(unknown))}: there are {', '.join(EXAMPLES)}")
    try:
        devices()
    except DriverUnavailableError:
        print("No GPU here: four simulated devices take their place.")
        os.environ[driver.SIMULATED_DEVICES_VARIABLE] = "4"
    if len(options.names) == 1:  # with all that it says
        return run(options.names[0], options.out).returncode
    failed = 0
    print(f"{'example':20}{'result':9}{'seconds':>8}  {'devices':29}last line")
    for name in options.names or EXAMPLES:
        begin = time.monotonic()
        done = run(name, options.out, capture_output=True)
        seconds = time.monotonic() - begin
        result = RESULTS.get(done.returncode, "FAILED")
        used = " ".join(sorted(set(re.findall(r"cuda:\d+", done.stdout)))) or "-"
        said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [""]
        last = said[0] if done.returncode == 2 else said[-1]
        print(f"{name:20}{result:9}{seconds:8.1f}  {used:29}{last}", flush=True)
        if result == "FAILED":
            failed += 1
            print(done.stdout + done.stderr, file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
