"""The pages on contexts and the recipes: the tests and the public names that they mention exist."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

import dask_devctx
from dask_devctx import Context, Device, PrimaryContext

ROOT = Path(__file__).parent.parent
PAGES = {
    name: (ROOT / "docs" / name).read_text() for name in ("scopes.md", "context.md", "recipes.md")
}
TEXT = PAGES["scopes.md"]
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
# The sections with a table, by the least number of points that their source makes.
POINTS = {
    "Why there is a current device": 7,
    "From the request for `with Device(n)` in cuda.core": 16,
    "From scopes that wait and transfer": 9,
    "From `oxicuda_driver::context`": 14,
    "From `rustacuda::context`": 25,
}
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))

# The class behind each name in the texts.
KINDS = {
    "Device": Device,
    "device": Device,
    "Context": Context,
    "context": Context,
    "own": Context,
    "primary_context": PrimaryContext,
}
# Of other libraries, the language, and the drivers.
THEIRS = re.compile(
    r"cupy|torch|cuda\.core|numba|jax|rustacuda|oxicuda|CUDA|cuda|CUresult|enum\.|asyncio|"
    r"ContextHandle|NULL|None|NaN"
)


def rows(section: str) -> list[str]:
    body = next(part for part in SECTIONS if part.startswith(section))
    return [line for line in body.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("section", POINTS)
def test_every_point_has_a_row_that_names_a_test(section):
    found = rows(section)
    assert len(found) >= POINTS[section]
    assert [row for row in found if not re.search(r"`tests/[\w/]+\.py::\w+` \|$", row)] == []


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def code(page: str) -> list[str]:
    """Return a page's code: spans outside the columns of others, and the blocks' lines."""
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    lines = []
    for line in text.splitlines():
        cells = line.split(" | ")
        ours = len(cells) == 3 and line.startswith("| ")
        lines.append(cells[1] if ours else line)
    return [*re.findall(r"`([^`\n]+)`", "\n".join(lines)), *blocks]


@pytest.mark.parametrize("page", PAGES)
def test_every_public_name_exists(page):
    attributes, names = set(), set()
    for piece in code(PAGES[page]):
        if re.search(r"tests/|https?:", piece):
            continue
        own = re.sub(r"\b(?:cupy|torch|cuda\.core)\.[\w.]+", "", piece)
        for first, last in re.findall(r"\b(\w+)(?:\([^()]*\))?\.(\w+)", own):
            if first in KINDS:
                attributes.add((first, last))
        if re.fullmatch(r"[A-Z]\w+", piece) and not THEIRS.match(piece):
            names.add(piece)
    assert len(attributes) >= 10
    missing = {f"{first}.{last}" for first, last in attributes if not hasattr(KINDS[first], last)}
    assert missing == set()
    assert len(names) >= 2
    assert names - {*dir(dask_devctx), *dir(builtins)} == set()
