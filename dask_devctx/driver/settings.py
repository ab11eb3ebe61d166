"""The settings of simulated devices: the environment, and dask's configuration if it is loaded."""

from __future__ import annotations

import os
import re
import sys
from typing import Final

from dask_devctx.driver.backends import SIMULATED_DEVICES_VARIABLE
from dask_devctx.errors import DriverUnavailableError
from dask_devctx.errors.base import variable, warn_of_variables

_SIMULATED_MEMORY_VARIABLE: Final = variable("simulated-memory")
_SIMULATED_MEMORY: Final = "16 GiB"
# What dask has read, if it was imported before this module; a variable may change afterwards.
_AT_IMPORT: Final = {
    name: text for name, text in os.environ.items() if name.startswith(variable(""))
}
_SIZE: Final = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?", re.IGNORECASE)


def simulated_devices() -> int:
    """Return how many devices are simulated; 0 where the real ones are used."""
    value = _configured("simulated-devices", SIMULATED_DEVICES_VARIABLE, 0)
    try:
        count = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):  # the last one is for infinity
        count = -1
    if isinstance(value, (bool, float)) or count < 0:
        raise DriverUnavailableError(
            f"devctx.simulated-devices must be a number of devices, 0 or more, got {value!r}",
            f"Set or unset {SIMULATED_DEVICES_VARIABLE}",
        )
    return int(count)


def simulated_memory() -> int:
    """Return how many bytes each simulated device has."""
    value = _configured("simulated-memory", _SIMULATED_MEMORY_VARIABLE, _SIMULATED_MEMORY)
    nbytes = 0 if isinstance(value, bool) else _nbytes(str(value))
    if nbytes < 1:
        raise DriverUnavailableError(
            f"devctx.simulated-memory must be a size such as '16 GiB', got {value!r}",
            f"Set or unset {_SIMULATED_MEMORY_VARIABLE}",
        )
    return nbytes


def _nbytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return 0
    number, prefix, binary = found.groups(default="")
    factor = (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError):
        return 0


def _configured(key: str, variable: str, default: object) -> object:
    value: object = None
    if "dask.config" in sys.modules:
        value = sys.modules["dask.config"].get(f"devctx.{key}", None)
    # dask reads the variable when it is imported, and keeps an empty one as "".
    if value is None or str(value) in ("", str(default), _AT_IMPORT.get(variable)):
        return os.environ.get(variable) or default
    return value


def warn_of_unknown_variables() -> None:
    """Warn of variables of the environment that set nothing, of each once in a process."""
    # Not by the package that reads this file: it imports dask.
    package = os.path.dirname(os.path.dirname(__file__))
    with open(os.path.join(package, "config", "devctx.yaml"), encoding="utf-8") as file:
        keys = re.findall(r"^  ([\w-]+):", file.read(), re.MULTILINE)
    warn_of_variables([*keys, "simulated-host"])
