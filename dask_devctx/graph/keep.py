"""Keeps ``device`` annotations that dask would lose on the way from client to scheduler.

dask resolves a collection's optimizer on the client, from its configuration, and runs it on the
scheduler. :func:`keep_annotations` sets the optimizers of :mod:`dask_devctx.graph.optimize` there,
where the user has set none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cloudpickle
import dask

from dask_devctx.dask_internals import check
from dask_devctx.graph import optimize

_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "array_optimize": optimize.optimize_array,
    "bag_optimize": optimize.optimize_bag,
    "delayed_optimize": optimize.optimize_delayed,
}


def keep_annotations() -> None:
    """Make ``device`` annotations of this process' collections survive, as long as it lives.

    Raises
    ------
    DevctxError
        The installed dask lacks a name that this package uses. Nothing was changed.

    Notes
    -----
    Sets dask's configuration ``array_optimize``, ``bag_optimize`` and ``delayed_optimize`` where
    they are not set. Your own optimizer stays, and has to keep annotations itself. The constructor
    of :class:`~dask_devctx.DevicePlugin` calls this function. Call it yourself on a client that
    makes no plugin, because the cluster has it from somewhere else.

    The optimizers act only on graphs with a ``device`` annotation. The scheduler does not need this
    package. ``compute(optimize_graph=False)`` keeps annotations too, but the scheduler then drops
    ``device=None``: write ``device="none"``.

    ``dask.dataframe`` drops annotations that are given where a frame is made, and warns of it once.
    It keeps those around ``compute()`` and ``persist()``.
    """
    check()
    for key, function in _OPTIMIZERS.items():
        if key not in dask.config.config:
            dask.config.update_defaults({key: Optimizer(function)})
        elif dask.config.config[key] == "":  # one that came through JSON
            dask.config.set({key: Optimizer(function)})


class Optimizer(str):
    """An optimizer as a value of dask's configuration.

    Clusters over SSH, among others, send the whole configuration as JSON. In JSON this object is an
    empty string, which dask takes for no optimizer. In a pickle it is the function by value.
    """

    __slots__ = ("function",)

    function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> Optimizer:
        self = super().__new__(cls)
        self.function = function
        return self

    def __call__(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        return self.function(dsk, keys, **kwargs)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (_by_value(self.function),)


# dask pickles the configuration for each process that it starts.
_by_value = functools.cache(cloudpickle.dumps)
