"""dask's graphs, arrays and frames on the client. This module needs dask alone.

The functions of dask are passed on unchanged, so that they can be sent to a scheduler that does not
have this package.
"""

from __future__ import annotations

import sys

from dask.blockwise import fuse_roots, optimize_blockwise
from dask.highlevelgraph import MaterializedLayer

from dask_devctx.dask_internals import unsupported

__all__ = ["MaterializedLayer", "count_elements_on_device", "fuse_roots", "optimize_blockwise"]


def count_elements_on_device(kind: type) -> bool:
    """Let dask.array, if it is imported, count a type's elements as an array of that type.

    Percentiles are asked of NumPy, whose protocol reaches the type: its own error is then shown.
    """
    if "dask.array.backends" not in sys.modules:
        return False
    from dask.array import backends, dispatch

    try:
        numel, percentile = backends._numel_arraylike, backends.percentile
        lookups = dispatch.numel_lookup, dispatch.percentile_lookup
    except AttributeError as error:
        raise unsupported(f"dask.array.{error.name}") from error
    lookups[0].register(kind, numel)
    lookups[1].register(kind, percentile)
    return True
