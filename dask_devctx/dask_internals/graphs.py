"""dask's graphs, arrays and frames on the client. This module needs dask alone.

The functions of dask are passed on unchanged, so that they can be sent to a scheduler that does not
have this package.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dask._task_spec import convert_legacy_graph
from dask.base import is_dask_collection
from dask.blockwise import fuse_roots, optimize_blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_devctx.dask_internals import unsupported
from dask_devctx.dask_internals.replacing import in_place

__all__ = [
    "MaterializedLayer",
    "before_each_frame",
    "convert_legacy_graph",
    "count_elements_on_device",
    "fuse_roots",
    "layers_of",
    "optimize_blockwise",
]

_FRAMES = "dask.dataframe.dask_expr._collection"


@contextmanager
def before_each_frame(call: Callable[[], bool]) -> Iterator[bool]:
    """While it is open, a function is called before each frame; yields whether frames are known.

    If it returns True, dask's own warning, that annotations are ignored, is left out.
    """
    module = sys.modules.get(_FRAMES)
    if module is None:
        yield False
        return
    frame = getattr(module, "FrameBase", None)
    if frame is None:
        raise unsupported(f"{_FRAMES}.FrameBase")
    opened = True

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def calling(self: Any, *args: Any, **kwargs: Any) -> None:
            if not opened or not call():
                init(self, *args, **kwargs)
                return
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Dask annotations .* detected", UserWarning)
                init(self, *args, **kwargs)

        return calling

    try:
        with in_place(frame, "__init__", wrap):
            yield True
    finally:
        opened = False  # another wrapper may be around it


def count_elements_on_device(kind: type) -> bool:
    """Let dask.array, if it is imported, count a type's elements as an array of that type.

    Percentiles are asked of NumPy, whose protocol reaches the type: its own error is then shown.
    """
    if "dask.array.backends" not in sys.modules:
        return False
    from dask.array import backends, dispatch

    for module, name in (
        (backends, "_numel_arraylike"),
        (backends, "percentile"),
        (dispatch, "numel_lookup"),
        (dispatch, "percentile_lookup"),
    ):
        if not hasattr(module, name):
            raise unsupported(f"{module.__name__}.{name}")
    dispatch.numel_lookup.register(kind, backends._numel_arraylike)
    dispatch.percentile_lookup.register(kind, backends.percentile)
    return True


def layers_of(given: Any) -> Iterator[Any]:
    """Yield the layers of collections or graphs; none of a frame, whose graph is not made yet."""
    if isinstance(given, list | tuple):
        for one in given:
            yield from layers_of(one)
    elif isinstance(given, HighLevelGraph):
        yield from given.layers.values()
    elif hasattr(given, "operands"):  # an expression, which dask makes of collections
        yield from layers_of([one for one in given.operands if not isinstance(one, str)])
    elif is_dask_collection(given) and not hasattr(given, "expr"):
        yield from layers_of(given.__dask_graph__())
