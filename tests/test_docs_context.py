"""The table of what other bindings have: each test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "context.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| `")]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


def test_every_row_names_a_test():
    assert len(ROWS) >= 30
    assert [row for row in ROWS if not re.search(r"`tests/[\w/]+\.py::\w+` \|$", row)] == []


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
