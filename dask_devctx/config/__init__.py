"""The ``devctx`` section of dask's configuration, and its defaults.

Files, ``DASK_DEVCTX__…`` variables and ``dask.config.set`` work as for dask's own sections.
``devctx.yaml`` explains each key; ``devctx-schema.yaml`` has the values that it may have.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import dask
import yaml

from dask_devctx.errors import nearest, variable


def _read(name: str) -> Any:
    text = resources.files("dask_devctx.config").joinpath(name).read_text("utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C, where it is


defaults: dict[str, Any] = _read("devctx.yaml")
dask.config.update_defaults(defaults)


@functools.cache
def schema() -> dict[str, Any]:
    """Return the schema of each key."""
    return _read("devctx-schema.yaml")["properties"]["devctx"]["properties"]  # type: ignore[no-any-return]


def get(key: str) -> Any:
    """Return the configuration's value."""
    # Programs that clear dask's configuration, as its own tests do, clear the defaults too.
    return dask.config.get(f"devctx.{key}", defaults["devctx"][key])


# A variable, but no key of the file.
_KNOWN = (*defaults["devctx"], "simulated-host")


def unknown_keys() -> list[str]:
    """Return a sentence for each unknown key; dask itself accepts a mistyped key."""
    said = []
    for key in dask.config.get("devctx", {}):
        name = key.lower().replace("_", "-")
        if name not in _KNOWN:
            near = nearest(name, _KNOWN)
            meant = f". Did you mean devctx.{near}?" if near else ""
            said.append(f"there is no devctx.{name} (in the environment {variable(key)}){meant}")
    for key in dask.config.config:
        if key.startswith("devctx_"):  # one underscore is part of a word
            meant = variable(key.removeprefix("devctx_"))
            said.append(f"DASK_{key.upper()} means nothing. Did you mean {meant}?")
    return said
