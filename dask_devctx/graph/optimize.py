"""dask's graph optimizers, made to keep annotations.

dask fuses the tasks of arrays and bags without regard to their annotations, and then loses the
annotations with the layers. So a graph with annotations of this package is only fused by whole
layers, which keeps them apart, as dask does with ``optimization.fuse.active`` False. Any other
graph goes to dask unchanged.

The functions run on the scheduler. They are sent there by value, so that a scheduler need not have
this package. So they use nothing of it but constants, and names of dask's own functions.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from dask_devctx.annotations import DEVICE, DEVICES, OURS
from dask_devctx.cuda.naming import NO_DEVICE
from dask_devctx.dask_internals.graphs import MaterializedLayer, fuse_roots, optimize_blockwise

Graph = Any  # a HighLevelGraph, or a mapping of tasks by key


def optimize_array(dsk: Graph, keys: Any, **kwargs: Any) -> Graph:
    """Optimize the graph of arrays within equal annotations."""
    from dask.array.optimization import optimize

    if not _is_annotated(dsk):
        return optimize(dsk, keys, **kwargs)
    wanted = _flat(keys)
    return _kept(fuse_roots(optimize_blockwise(dsk, keys=wanted), keys=wanted), wanted)


def optimize_bag(dsk: Graph, keys: Any, **kwargs: Any) -> Graph:
    """Optimize the graph of bags within equal annotations."""
    from dask.bag.core import optimize

    return _kept(dsk, _flat(keys)) if _is_annotated(dsk) else optimize(dsk, keys, **kwargs)


def optimize_delayed(dsk: Graph, keys: Any, **kwargs: Any) -> Graph:
    """Optimize the graph of delayed values within equal annotations."""
    from dask.delayed import optimize

    return _kept(dsk, _flat(keys)) if _is_annotated(dsk) else optimize(dsk, keys, **kwargs)


def _is_annotated(dsk: Graph) -> bool:
    return isinstance(dsk, HighLevelGraph) and any(
        not OURS.isdisjoint(layer.annotations or ()) for layer in dsk.layers.values()
    )


def _flat(keys: Any) -> set[Hashable]:
    return set(flatten(keys if isinstance(keys, (list, set)) else [keys]))


def _kept(dsk: HighLevelGraph, wanted: set[Hashable]) -> HighLevelGraph:
    """Return the part of a graph that is wanted; its annotations survive the scheduler."""
    layers = {}
    for name, layer in dsk.cull(wanted).layers.items():
        given = (layer.annotations or {}).items()
        own = {annotation: partial(_answer, annotation, value) for annotation, value in given}
        layers[name] = MaterializedLayer(dict(layer), annotations=own)
    found = {key: name for name, layer in layers.items() for key in layer}
    dependencies = {  # dask's own cull leaves them empty
        name: {found[dep] for key in layer for dep in layer.get_dependencies(key, found)} - {name}
        for name, layer in layers.items()
    }
    return HighLevelGraph(layers, dependencies)


def _answer(name: str, value: Any, key: Hashable) -> Any:
    """Return a key's own annotation, with "none" for None, which the scheduler drops."""
    own = value(key) if callable(value) else value
    return NO_DEVICE if own is None and name in (DEVICE, DEVICES) else own


_SENT = optimize_array, optimize_bag, optimize_delayed, _answer, _flat, _is_annotated, _kept
for _function in _SENT:
    _function.__module__ = "__main__"  # so that it is sent by value
