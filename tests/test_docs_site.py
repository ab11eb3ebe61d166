"""The documentation is complete, and its code runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import tomllib

import click
import pytest
import yaml
from cuda.bindings.driver import CUresult
from distributed.cli import dask_scheduler, dask_worker

import dask_devctx
from dask_devctx import Device, SimulatedArray
from dask_devctx.cli import devctx
from tests.python import ROOT, python

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
ARCHITECTURE = (ROOT / "docs" / "images" / "architecture.svg").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCK = re.compile(r"^([ ]*)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# A page's Python, in its order: what a reader sees; `<!-- run:` has lines that the next blocks
# need, or that check the last one; `<!-- compile only:` says why the next cannot run everywhere.
PIECE = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$|^<!-- compile only: (?P<reason>[^\n]+) -->$|"
    r"^(?P<indent>[ ]*)```python\n(?P<shown>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page's text in a language, without the indentation of a list."""
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for indent, named, text in BLOCK.findall(page)
        if named == language
    ]


def documented() -> dict[str, tuple[str, str]]:
    """Return the page and the kind of each name of the API reference, by its whole name."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        for kind, name in re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", path.read_text(), re.M):
            whole = name if name.startswith("dask_devctx.") else f"dask_devctx.{name}"
            assert whole not in found, f"{whole} is documented twice"
            found[whole] = path.name, kind
    return found


def test_every_public_name_is_in_the_api_reference():
    public = {f"dask_devctx.{name}" for name in (*dask_devctx.__all__, "SimulatedArray")}
    missing = public - documented().keys()
    assert not missing, f"docs/api has no entry (.. autofunction:: and so on) for {missing}"


@pytest.mark.parametrize("name", documented())
def test_a_documented_name_exists_and_says_what_it_is(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.parametrize(
    "name", [name for name, (_, kind) in documented().items() if kind == "function"]
)
def test_a_documented_function_explains_each_parameter(name):
    """``help()`` and the site show the same text."""
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    said = inspect.getdoc(function) or ""
    assert {one for one in inspect.signature(function).parameters if one not in said} == set()


@pytest.mark.parametrize("page", PAGES)
def test_code_compiles_and_imports_public_names(page):
    for text in blocks(PAGES[page], "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dask_devctx"):
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def program(page: str) -> tuple[str, list[str]]:
    """Return a page's Python that runs, in one piece, and the reasons why some blocks do not."""
    code, reasons, skip = [], [], False
    for piece in PIECE.finditer(PAGES[page]):
        if piece["reason"]:
            skip = True
            reasons.append(piece["reason"])
        elif piece["hidden"]:
            code.append(piece["hidden"])
        elif skip:
            skip = False
        else:
            code.append(re.sub(f"^{piece['indent']}", "", piece["shown"], flags=re.MULTILINE))
    return "\n".join(code), reasons


# The needs of blocks that some machines do not have.
NEEDS = re.compile(r"needs (CuPy|torch|RMM|dask-cuda|SLURM|SSH)\b")


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_does_not_run_has_a_reason(page):
    code, reasons = program(page)
    compile(code, page, "exec")
    assert [reason for reason in reasons if not NEEDS.match(reason)] == []
    assert PAGES[page].count("compile only") == len(reasons)
    assert PAGES[page].count("<!-- run:") == len(re.findall("^<!-- run:$", PAGES[page], re.M))


@pytest.mark.timeout(300)
def test_code_runs(tmp_path):
    """All blocks run. Each page has names of its own; one process saves the imports."""
    pages = {page: code for page in PAGES if (code := program(page)[0])}
    assert len(pages) >= 15
    runner = (
        "import json, sys\n"
        "for page, code in json.load(sys.stdin).items():\n"
        "    print('PAGE', page, file=sys.stderr, flush=True)\n"
        "    exec(compile(code, page, 'exec'), {'__name__': '__main__'})\n"
    )
    # One worker for all devices, from a process that has dask already: the code is the same.
    variables = {
        "DASK_DEVCTX__SIMULATED_DEVICES": "4",
        "DASK_DEVCTX__IPC": "false",
        "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",
    }
    given = {"input": json.dumps(pages), "cwd": tmp_path, "timeout": 280}
    done = python("-c", runner, env=variables, **given)
    assert done.stderr.count("PAGE") == len(pages)
    assert "Traceback (most" not in done.stderr, done.stderr


def test_commands_and_extras_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets, commands, extras = set(), set(), set()
    for page in PAGES:
        said = "\n".join(blocks(PAGES[page], "console") + blocks(PAGES[page], "bash"))
        targets |= set(re.findall(r"^\$ make ([\w-]+)", said, re.MULTILINE))
        commands |= set(re.findall(r"dask devctx (\w+)", said))
        for listed in re.findall(r"(?:\.|dask-devctx)\[([\w,-]+)\]", PAGES[page]):
            extras |= set(listed.split(","))
    assert targets
    assert {one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE)} == set()
    assert commands
    assert commands - set(devctx.commands) == set()
    assert extras
    assert extras - set(PROJECT["optional-dependencies"]) == set()


LINES = sorted(
    {
        line
        for page in PAGES
        for text in blocks(PAGES[page], "console") + blocks(PAGES[page], "bash")
        for line in re.findall(r"^(?:\$ |srun )?(dask .+?)(?: &)?$", text, re.MULTILINE)
    }
)


@pytest.mark.parametrize("line", LINES)
def test_the_options_of_a_command_are_accepted(line):
    """Commands themselves run in `tests/distributed/cli`."""
    groups = {"devctx": devctx, "worker": dask_worker.main, "scheduler": dask_scheduler.main}
    command, *arguments = shlex.split(line)[1:]
    found = groups[command]
    while isinstance(found, click.Group):
        found = found.commands[arguments.pop(0)]
    found.make_context(line, arguments)


def test_the_configuration_in_pages_has_keys_that_exist():
    defaults = yaml.safe_load((ROOT / "dask_devctx" / "config" / "devctx.yaml").read_text())
    shown = [yaml.safe_load(text) for page in PAGES for text in blocks(PAGES[page], "yaml")]
    assert len(shown) >= 2
    keys = {key for one in shown for key in one.get("devctx", {})}
    assert keys
    assert keys - set(defaults["devctx"]) == set()


# Files and rooms in pages, by their place in the checkout, in the package or in one of its rooms.
PLACES = ("", "dask_devctx", "dask_devctx/worker")
ROOMS = "|".join(
    sorted({path.name for place in PLACES for path in (ROOT / place).iterdir() if path.is_dir()})
)


def test_every_path_in_a_page_exists():
    pages = [*PAGES.values(), (ROOT / "CONTRIBUTING.md").read_text()]
    named = set(re.findall(rf"`((?:{ROOMS})/[\w./-]*)", "\n".join(pages)))
    named |= set(re.findall(r"\b((?:worker|transfer)/\w+)", ARCHITECTURE))
    assert len(named) >= 40
    assert {
        path for path in named if not any((ROOT / place / path).exists() for place in PLACES)
    } == set()


def test_the_pages_are_short():
    """Words outside of code blocks; of a link, its text counts."""
    folder = ROOT / "docs" / "api"
    texts = [*PAGES.values(), *(path.read_text() for path in folder.glob("*.md"))]
    prose = "\n".join(texts)
    prose = re.sub(r"<!--.*?-->", "", prose, flags=re.DOTALL)
    prose = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", prose, flags=re.DOTALL | re.MULTILINE)
    words = len(re.findall(r"\w[\w'’.,-]*", re.sub(r"\]\([^)]*\)", "]", prose)))
    assert words <= 20_000, "shorten a passage, or for a feature raise this limit"


# Words that have a standard one: see the glossary.
OWN_WORDS = re.compile(
    r"\b(Python's lock|waits? for a place|standstill|departures?|contenders?|anew|thereof|"
    r"whom|hence|lest|for ever)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES)
def test_standard_words(page):
    assert OWN_WORDS.findall(PAGES[page]) == []


def test_links_lead_to_pages_and_files():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), (page, target)


def test_versions_agree():
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
    recipe = (ROOT / "recipe" / "meta.yaml").read_text()
    assert f'version = "{version}"' in recipe
    for needed in PROJECT["dependencies"]:
        name, _, least = needed.partition(">=")
        assert f"- {name} >={least}\n" in recipe


def test_workflows_run_commands_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    ran = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            ran += [step["run"] for step in job["steps"] if "run" in step]
    targets = [line.split()[1] for line in ran if line.startswith("make ")]
    assert {"test", "test-long", "lint", "docs", "dist-check"} <= set(targets)
    assert all(f"\n{target}:" in makefile for target in targets)


# -- the pages on contexts, which name tests, and the recipe that handles errors

SCOPES = (ROOT / "tests" / "cuda" / "SCOPES.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SCOPES)))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_is_there(path, name):
    body = ast.parse((ROOT / path).read_text()).body
    assert name in [getattr(node, "name", "") for node in body]


def test_the_recipe_handles_errors(machine):
    (text,) = re.findall(
        r"^## Transfer and wait, with errors handled\n.*?```python\n(.*?)```",
        PAGES["docs/recipes.md"],
        re.MULTILINE | re.DOTALL,
    )
    names = {}
    exec(compile(text, "recipes.md", "exec"), names)
    with Device(0):
        data = SimulatedArray.asarray([1.0, 2.0])
    machine.gpus[1].used_memory = machine.gpus[1].total_memory
    assert names["total"](data, [Device(1), Device(2)]) == 6.0
    with pytest.raises(MemoryError, match="no device has room"):
        names["total"](data, [Device(1)])
    machine.gpus[1].used_memory = 0
    machine.faults.inject("cuCtxSynchronize", CUresult.CUDA_ERROR_LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="work on cuda:1 failed: CUDA_ERROR_LAUNCH_FAILED"):
        names["total"](data, [Device(1)])
    assert Device.current() is None
