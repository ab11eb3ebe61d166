"""The documentation is complete, and its code runs."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dask_devctx

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCK = re.compile(r"^([ ]*)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# All blocks of these run, in their order, in one process: a reader copies them so.
RUN = (
    "README.md",
    "docs/index.md",
    "docs/get-started.md",
    "docs/from-ray.md",
    "docs/from-device-contexts.md",
    "docs/simulated.md",
)


def blocks(page: str, language: str) -> list[str]:
    """Return a page's blocks in a language, without the indentation of a list."""
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for indent, named, text in BLOCK.findall(PAGES[page])
        if named == language
    ]


def documented() -> dict[str, str]:
    """Return the page of each name of the API reference, by its whole name."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", path.read_text(), re.MULTILINE):
            whole = name if name.startswith("dask_devctx.") else f"dask_devctx.{name}"
            assert whole not in found, f"{whole} is documented twice"
            found[whole] = path.name
    return found


def test_every_public_name_is_in_the_api_reference():
    public = {f"dask_devctx.{name}" for name in (*dask_devctx.__all__, "SimulatedArray")}
    assert public - documented().keys() == set()


@pytest.mark.parametrize("name", documented())
def test_a_documented_name_exists_and_says_what_it_is(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.parametrize("page", PAGES)
def test_code_compiles_and_imports_public_names(page):
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dask_devctx"):
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


@pytest.mark.timeout(300)
def test_code_runs(tmp_path):
    """Each page has names of its own; one process saves the imports."""
    pages = {page: "\n".join(blocks(page, "python")) for page in RUN}
    program = (
        "import json, sys\n"
        "for page, code in json.load(sys.stdin).items():\n"
        "    print('PAGE', page, file=sys.stderr, flush=True)\n"
        "    exec(compile(code, page, 'exec'), {'__name__': '__main__'})\n"
    )
    # Two devices and one worker for them start in less time, and the code is the same.
    variables = {
        "PYTHONPATH": str(ROOT),
        "DASK_DEVCTX__SIMULATED_DEVICES": "2",
        "DASK_DEVCTX__IPC": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(pages),
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("PAGE") == len(RUN)
    assert "Traceback" not in done.stderr, done.stderr


def test_commands_and_extras_exist():
    makefile = (ROOT / "Makefile").read_text()
    from dask_devctx.cli import devctx

    targets, commands, extras = set(), set(), set()
    for page in PAGES:
        said = "\n".join(blocks(page, "console") + blocks(page, "bash"))
        targets |= set(re.findall(r"^\$ make ([\w-]+)", said, re.MULTILINE))
        commands |= set(re.findall(r"dask devctx (\w+)", said))
        for listed in re.findall(r"(?:\.|dask-devctx)\[([\w,]+)\]", PAGES[page]):
            extras |= set(listed.split(","))
    assert targets
    assert {one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE)} == set()
    assert commands
    assert commands - set(devctx.commands) == set()
    assert extras
    assert extras - set(PROJECT["optional-dependencies"]) == set()


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES["README.md"])
    assert len(targets) >= 5
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_versions_agree():
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
