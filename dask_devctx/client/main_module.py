"""A script that starts a cluster while each of the cluster's processes imports the script."""

from __future__ import annotations

import ast
import sys
from multiprocessing import process
from pathlib import Path
from types import FrameType

import dask


def refuse_unguarded_main() -> None:
    """Refuse a start at the top level of the main script, which every worker would repeat."""
    if dask.config.get("distributed.worker.multiprocessing-method", "spawn") == "fork":
        return  # such a process imports nothing
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    if path is None or (spec is not None and spec.name.endswith("__main__")):
        return  # a console, a notebook, or a package: not imported again
    if not _is_file(path):
        raise RuntimeError(
            f"the main program comes from {path}, which is no file. Each worker is a process that "
            "imports the main program, and could not. Save it in a file, with the start under: if "
            '__name__ == "__main__":, or give processes=False for workers in this process'
        )
    line = _line_of(path)
    if line is not None and _is_unguarded(Path(path), line):
        raise RuntimeError(
            f"{path}, line {line}, starts a cluster at the top level of the script. Each worker is "
            "a process that imports the script, and would start a cluster again. Put the start, "
            'and all that follows, under: if __name__ == "__main__":'
        )


def _is_file(path: str) -> bool:
    """Return whether a new process finds the main program, as multiprocessing looks for it."""
    return (Path(process.ORIGINAL_DIR or "") / path).is_file()  # type: ignore[attr-defined]


def _line_of(path: str) -> int | None:
    """Return the line that the main script executes now; None if another program runs."""
    main = Path(path).absolute()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and Path(code.co_filename).absolute() == main:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_unguarded(path: Path, line: int) -> bool:
    """Return whether a line is in a statement of the top level that no condition is around."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    around = [node for node in body if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return bool(around) and not isinstance(around[0], ast.If)
