"""These tests need no addresses of functions; those that do have both kinds of driver."""

from __future__ import annotations

import pytest


@pytest.fixture
def simulation() -> str:
    return "simulated"
