"""The least that a scope can cost: its three calls, made by a C loop that is compiled here."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from dask_devctx.driver.calls import Calls

_SOURCE = """
#include <time.h>
double loop(int (*get)(void **), int (*set)(void *), void *context, long count)
{
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long i = 0; i < count; i++) {
        void *previous;
        get(&previous);
        set(context);
        set(previous);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec);
}
"""


class CannotCompileError(Exception):
    """The floor cannot be measured."""


def loop(calls: Calls, handle: int) -> Callable[[int], float]:
    """Return a function that makes the three calls n times and returns the seconds.

    Raises
    ------
    CannotCompileError
        There is no compiler, or the driver does not tell its addresses.
    """
    get_current, set_current = (
        calls.checked.address(name) for name in ("cuCtxGetCurrent", "cuCtxSetCurrent")
    )
    if not get_current or not set_current:
        raise CannotCompileError("the driver does not tell the addresses of its functions")
    function = _compiled()

    def run(count: int) -> float:
        return float(function(get_current, set_current, handle, count))

    return run


@functools.cache
def _compiled() -> Callable[..., float]:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotCompileError("no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "floor.c"), Path(folder, "floor.so")
        source.write_text(_SOURCE)
        done = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", library, source],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CannotCompileError(f"{compiler} fails: {done.stderr.strip()[:200]}")
        function = ctypes.CDLL(str(library)).loop
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    return function  # type: ignore[no-any-return]
