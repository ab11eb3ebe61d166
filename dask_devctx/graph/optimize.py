"""dask's graph optimizers, made to keep annotations.

dask fuses the tasks of arrays and bags without regard to their annotations, and then loses the
annotations with the layers. These functions give each set of tasks with equal annotations to dask's
own optimizer. A graph without annotations of this package goes to dask unchanged.

The functions run on the scheduler. They are sent there by value, so that a scheduler need not have
this package. So they use nothing of it but names of dask's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.utils import ensure_dict

from dask_devctx.dask_internals.graphs import (
    MaterializedLayer,
    convert_legacy_graph,
    fuse_roots,
    optimize_blockwise,
)

# The annotations of this package; the values of the first two may be None, which means no device.
NAMES = frozenset({"device", "devices", "device_share", "device_memory", "rerun"})
MAY_BE_NONE = frozenset({"device", "devices"})

Graph = Any  # a HighLevelGraph, or a mapping of tasks by key
Annotations = dict[str, Any]


def optimize_array(dsk: Graph, keys: Any, **kwargs: Any) -> Graph:
    """Optimize the graph of arrays within equal annotations."""
    from dask.array.optimization import optimize

    return _optimize(optimize, dsk, keys, kwargs, by_layers=True)


def optimize_bag(dsk: Graph, keys: Any, **kwargs: Any) -> Graph:
    """Optimize the graph of bags within equal annotations."""
    from dask.bag.core import optimize

    return _optimize(optimize, dsk, keys, kwargs)


def optimize_delayed(dsk: Graph, keys: Any, **kwargs: Any) -> Graph:
    """Optimize the graph of delayed values within equal annotations."""
    from dask.delayed import optimize

    return _optimize(optimize, dsk, keys, kwargs)


def _optimize(
    optimize: Callable[..., Graph],
    dsk: Graph,
    keys: Any,
    kwargs: dict[str, Any],
    by_layers: bool = False,
) -> Graph:
    if not isinstance(dsk, HighLevelGraph) or not any(
        not NAMES.isdisjoint(layer.annotations or ()) for layer in dsk.layers.values()
    ):
        return optimize(dsk, keys, **kwargs)
    wanted = set(flatten(keys if isinstance(keys, (list, set)) else [keys]))
    if by_layers:  # dask's fusion of whole layers keeps annotations apart
        dsk = fuse_roots(optimize_blockwise(dsk, keys=wanted), keys=wanted)
    dsk = dsk.cull(wanted)

    layer_of = {key: name for name, layer in dsk.layers.items() for key in layer}
    annotated = {
        key: _of_key(layer.annotations, key) for layer in dsk.layers.values() for key in layer
    }
    tasks = convert_legacy_graph(ensure_dict(dsk))
    groups: list[tuple[Annotations, dict[Hashable, Any]]] = []
    for key, task in tasks.items():
        annotations = annotated[key]
        for known, group in groups:
            if known == annotations:
                group[key] = task
                break
        else:
            groups.append((annotations, {key: task}))

    layers: dict[str, dict[Hashable, Any]] = {name: {} for name in dsk.layers}
    values: dict[str, dict[str, dict[Hashable, Any]]] = {name: {} for name in dsk.layers}
    for annotations, group in groups:
        # The results that other groups need must stay, and so must those that the user wants.
        outside = (task for key, task in tasks.items() if key not in group)
        needed = {dep for task in outside for dep in task.dependencies} | wanted
        outputs = [key for key in group if key in needed]
        optimized = convert_legacy_graph(ensure_dict(optimize(group, outputs, **kwargs)))
        for key, task in optimized.items():  # a task that was fused under a new name has an alias
            if key in layer_of:
                layer_of.update(
                    {dep: layer_of[key] for dep in task.dependencies if dep not in tasks}
                )
        for key, task in optimized.items():
            layers[layer_of[key]][key] = task
            for name, value in annotations.items():
                values[layer_of[key]].setdefault(name, {})[key] = value

    found = {key: name for name, layer in layers.items() for key in layer}
    return HighLevelGraph(
        {
            name: MaterializedLayer(
                layer,
                annotations={a: partial(_value, by_key) for a, by_key in values[name].items()},
            )
            for name, layer in layers.items()
        },
        {
            name: {
                found[dep]
                for task in layer.values()
                for dep in task.dependencies
                if dep in found and found[dep] != name
            }
            for name, layer in layers.items()
        },
    )


def _of_key(annotations: Mapping[str, Any] | None, key: Hashable) -> Annotations:
    """Return a key's own annotations, with "none" for None, which the scheduler drops."""
    of_key = {n: v(key) if callable(v) else v for n, v in (annotations or {}).items()}
    return {
        name: "none" if value is None else value
        for name, value in of_key.items()
        if value is not None or name in MAY_BE_NONE
    }


def _value(by_key: dict[Hashable, Any], key: Hashable) -> Any:
    return by_key.get(key)
