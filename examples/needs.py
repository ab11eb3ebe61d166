"""Say what an example lacks on this machine, and how to get it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from dask_devctx import DriverUnavailableError, devices, driver

# Packages whose name at installation is another one.
INSTALL = {"cupy": "'cupy-cuda13x[ctk]'", "skimage": "scikit-image"}


def needs(*packages: str, on_gpus: str = "cupy") -> None:
    """End the program with status 2 if a device or a package is missing.

    Parameters
    ----------
    packages
        The packages that the example imports.
    on_gpus
        The library that it computes with on GPUs; simulated devices need NumPy instead.
    """
    try:
        found = devices()
    except DriverUnavailableError as error:
        found, reason = (), str(error)
    else:
        reason = "CUDA_VISIBLE_DEVICES hides all of them"
    if not found:
        refuse(f"no GPU: set DASK_DEVCTX__SIMULATED_DEVICES=4 to run on simulated ones\n{reason}")
    library = "numpy" if driver.backend().simulated else on_gpus
    for package in (*packages, library):
        if find_spec(package) is None:
            remedy = INSTALL.get(package, package)
            refuse(f"this example needs the package {package}: pip install {remedy}")


def refuse(why: str) -> None:
    print(why, file=sys.stderr)
    sys.exit(2)
