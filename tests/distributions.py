"""The sdist and both wheels are right: the wheel's tag, what is in them, and that they run.

Run as ``make dist-check``; it takes a minute. The wheels are built from the unpacked sdist, with
the machine's C compiler and with none, and the tests run there. The README's code runs in an empty
environment, where only the wheel is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests that need something beside them: helpers, documents, examples, headers, a process.
SOME_TESTS = (
    "tests/test_errors.py",
    "tests/driver",
    "tests/distributed/test_config.py",
    "tests/failures/test_modes.py",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        packed = build(ROOT, Path(folder, "sdist"), "--sdist")
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
        unpacked = Path(folder, packed.name.removesuffix(".tar.gz"))
        check_tests(unpacked)
        # without a compiler first: nothing built is there yet that could be taken up
        pure = build(unpacked, Path(folder, "pure"), "--wheel", CC="/bin/false")
        check_wheel(pure, extension=False)
        native = build(unpacked, Path(folder, "native"), "--wheel")
        check_wheel(native, extension=True)
        check_readme(pure, Path(folder, "empty"))
    print(f"{packed.name}, {native.name} and {pure.name} are right")


def build(source: Path, into: Path, *options: str, **env: str) -> Path:
    """Return the one file that ``python -m build`` makes."""
    run("-m", "build", *options, "--outdir", str(into), str(source), cwd=into.parent, env=env)
    (made,) = into.iterdir()
    return made


def check_wheel(path: Path, *, extension: bool) -> None:
    """The tag, the metadata and the files of a wheel say the same."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        said = wheel.read(metadata).decode()
    compiled = [name for name in names if name.endswith(".so")]
    assert compiled == (["dask_devctx/driver/_scope.abi3.so"] if extension else []), compiled
    tag = path.stem.split("-", 2)[2]
    assert ("cp311-abi3-" in tag) if extension else (tag == "py3-none-any"), tag
    assert f"Tag: {tag}" in said, said
    assert f"Root-Is-Purelib: {str(not extension).lower()}" in said, said
    strangers = {name.split("/")[0] for name in names} - {"dask_devctx", metadata.split("/")[0]}
    assert not strangers, strangers


def check_tests(unpacked: Path) -> None:
    """All tests can be collected in the unpacked sdist, and some of them run."""
    there = str(unpacked / "dask_devctx" / "__init__.py")
    run("-c", f"import dask_devctx as it; assert it.__file__ == {there!r}, it", cwd=unpacked)
    run("-m", "pytest", "-q", "--collect-only", "tests", cwd=unpacked)
    run("-m", "pytest", "-q", *SOME_TESTS, cwd=unpacked)


def check_readme(wheel: Path, environment: Path) -> None:
    """`pip install` of a wheel is enough for all Python of the README, on simulated devices."""
    run("-m", "venv", str(environment), cwd=ROOT)
    python = str(environment / "bin" / "python")
    run("-m", "pip", "install", "-q", f"{wheel}[simulated]", cwd=environment, python=python)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) >= 3
    devices = {"DASK_DEVCTX__SIMULATED_DEVICES": "2"}
    run("-c", "\n".join(blocks), cwd=environment, env=devices, python=python)


def run(
    *args: str, cwd: Path, env: dict[str, str] | None = None, python: str = sys.executable
) -> None:
    """Run Python; say all that it said where it fails."""
    done = subprocess.run(
        [python, *args],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(args)} failed in {cwd}:\n{done.stdout}")


if __name__ == "__main__":
    main()
