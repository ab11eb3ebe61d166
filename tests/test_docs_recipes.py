"""The recipes run as they stand, and the one that handles errors handles them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda.bindings.driver import CUresult

from dask_devctx import Device
from dask_devctx.simulated_array import SimulatedArray

TEXT = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
RECIPE = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", re.MULTILINE | re.DOTALL)
RECIPES = dict(RECIPE.findall(TEXT))


def run(title):
    names = {"__name__": title}
    exec(compile(RECIPES[title], title, "exec"), names)
    return names


def test_all_are_found():
    assert len(RECIPES) == TEXT.count("```python") == 6


@pytest.mark.parametrize("title", RECIPES)
def test_runs(machine, title):
    run(title)
    assert Device.current() is None


@pytest.fixture
def total(machine):
    return run("Transfer and wait, with errors handled")["total"]


def test_the_recipe_goes_on_where_memory_runs_out(total, machine):
    with Device(0):
        data = SimulatedArray.asarray([1.0, 2.0])
    machine.gpus[1].used_memory = machine.gpus[1].total_memory
    assert total(data, [Device(1), Device(2)]) == 6.0
    with pytest.raises(MemoryError, match="no device has room"):
        total(data, [Device(1)])
    machine.gpus[1].used_memory = 0


def test_the_recipe_tells_of_work_that_failed(total, machine):
    with Device(0):
        data = SimulatedArray.asarray([1.0, 2.0])
    machine.faults.inject("cuCtxSynchronize", CUresult.CUDA_ERROR_LAUNCH_FAILED)
    with pytest.raises(RuntimeError, match="the work on cuda:1 failed: CUDA_ERROR_LAUNCH_FAILED"):
        total(data, [Device(1)])
    assert Device.current() is None
