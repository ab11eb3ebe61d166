"""The host as a destination: ``to_device(value, "cpu")``."""

from __future__ import annotations

from dask_devctx.transfer.registry import Registry


def is_host(device: object) -> bool:
    """Return whether a device means the host: ``"cpu"``, or torch's device of that type."""
    kind = getattr(device, "type", device)
    return isinstance(kind, str) and kind == "cpu"


to_host = Registry("to_host", lambda value: None)
to_host.__doc__ = """Copies of values in host memory: register a function for a type of your own.

``to_host.register(T)`` decorates a function that takes a value of the type ``T`` and returns a
complete copy in host memory. At the call the value's device is current, and its current streams
wait for the work that makes the value. ``to_device(value, "cpu")`` calls it.
"""


def cannot_be_copied(value: object, device: object) -> TypeError:
    """Return the error for a value of a type that ``to_host`` does not know."""
    kind = type(value).__qualname__
    return TypeError(
        f"a {kind} lives on {device}, and nothing is known that copies one to the host. For a type "
        "of your own, register a function that takes one and returns the copy, beside its function "
        f"for to_device: from dask_devctx.transfer import to_host; to_host.register({kind}). For a "
        "library's array, call the library's own: CuPy's .get(), torch's .cpu(), Numba's "
        ".copy_to_host(), jax.device_get"
    )
