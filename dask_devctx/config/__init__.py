"""The ``devctx`` section of dask's configuration, and its defaults.

Files, ``DASK_DEVCTX__…`` variables and ``dask.config.set`` work as for dask's own sections. The
meaning of each key is in ``devctx.yaml``, its range in ``devctx-schema.yaml``.
"""

from __future__ import annotations

import difflib
import warnings
from importlib import resources
from typing import Any

import dask
import yaml
from dask.utils import parse_timedelta


def _read(name: str) -> Any:
    return yaml.safe_load(resources.files("dask_devctx.config").joinpath(name).read_text("utf-8"))


defaults: dict[str, Any] = _read("devctx.yaml")
dask.config.update_defaults(defaults)


def get(key: str, given: Any = None) -> Any:
    """Return an argument, or the configuration's value where it is None.

    Parameters
    ----------
    key
        A key of the section, such as ``"tasks-per-device"``.
    given
        An argument that overrides the configuration; None where there is none.
    """
    if given is not None:
        return given
    # Whoever clears dask's configuration, as its own tests do, clears the defaults with it.
    return dask.config.get(f"devctx.{key}", defaults["devctx"][key])


def unknown_keys() -> list[str]:
    """Return a sentence for each key that means nothing; dask accepts a mistyped one silently."""
    known = [*defaults["devctx"], "simulated-host"]  # which only the environment can say
    said = []
    for key in dask.config.get("devctx", {}):
        name = key.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; devctx.{near[0]}?" if near else ""
            said.append(f"there is no devctx.{name} (in the environment {_variable(key)}){meant}")
    for key in dask.config.config:
        if key.startswith("devctx_"):  # one underscore is part of a word
            variable = _variable(key.removeprefix("devctx_"))
            said.append(f"DASK_{key.upper()} means nothing; {variable}?")
    return said


def warn_of_unknown_keys() -> None:
    """Warn of keys that mean nothing."""
    for text in unknown_keys():
        warnings.warn(text, stacklevel=3)


def _variable(key: str) -> str:
    return f"DASK_DEVCTX__{key.upper().replace('-', '_')}"


def seconds(key: str) -> float | None:
    """Return a time of the configuration in seconds; None where it is null.

    Raises
    ------
    ValueError
        It is no time; the key is named.
    """
    value = get(key)
    try:
        found: float | None = parse_timedelta(value)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"devctx.{key} is a time such as '100us' or '30s', got {value!r}"
        ) from None
    return found
