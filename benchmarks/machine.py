"""A description of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from dask_devctx import devices, driver
from dask_devctx.errors import DevctxError

_PACKAGES = (
    "dask-devctx cuda-bindings nvidia-ml-py dask distributed numpy cupy-cuda12x cupy-cuda13x cupy "
    "torch numba numba-cuda jax dask-cuda rmm-cu12 rmm-cu13 distributed-ucxx-cu12 "
    "distributed-ucxx-cu13"
)


def describe() -> dict[str, Any]:
    """Return the GPUs, the driver, the CPU, Python, and the versions of the packages."""
    return {
        "gpus": _gpus(),
        "driver": _driver(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": dict(_versions()),
    }


def lines(machine: dict[str, Any]) -> list[str]:
    """Return the description for a person to read."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return [
        f"GPUs     {'; '.join(machine['gpus']) or 'none'}",
        f"driver   {machine['driver']}",
        f"CPU      {machine['cpu']}, {machine['cpus']} to use",
        f"system   {machine['system']}, {machine['python']}",
        f"versions {packages}",
    ]


def _gpus() -> list[str]:
    try:
        return [str(device.name) for device in devices()]
    except DevctxError:
        return []


def _driver() -> str:
    backend = driver.backend()
    try:
        backend.nvml.nvmlInit()
        version = backend.nvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # NVML has many errors, and none of them matters here
        return f"unknown: {error}"
    return f"{version}, simulated" if backend.simulated else str(version)


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES.split():
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
