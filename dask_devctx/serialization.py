"""How what is on a device travels, where distributed sends it wrongly or not at all.

- A tensor's memory is taken for the host's, and a module is taken apart into its attributes: what
  two of them share is two things afterwards.
- Numba's arrays with gaps are refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from distributed.protocol import dask_serialize

from dask_devctx.device import Device

Serialized = tuple[dict[str, Any], list[Any]]


def register() -> None:
    """Make torch's and Numba's values on devices known to distributed, once the library is there.

    Notes
    -----
    They go through host memory, and arrive on the device that is current where they are unpacked.
    Who unpacks them needs nothing of this package. Tensors that NumPy has no type or layout for,
    and modules, are pickled as torch does that: they arrive on the device of the same number.

    References
    ----------
    ``distributed.protocol.torch``, ``distributed.protocol.numba``.
    """
    for library, with_it in (("torch", _register_torch), ("numba", _register_numba)):
        dask_serialize.register_lazy(library, with_it)
        if f"distributed.protocol.{library}" in sys.modules:  # then nobody asks for it any more
            with_it()


@functools.cache
def _register_torch() -> None:
    import torch
    from distributed.protocol import torch as theirs

    def serialize_tensor(tensor: Any) -> Serialized:
        if not tensor.is_cuda:
            return theirs.serialize_torch_Tensor(tensor)  # type: ignore[no-any-return]
        on_host = tensor.detach().cpu()
        try:
            on_host.numpy()
        except (TypeError, RuntimeError) as error:
            raise NotImplementedError(f"NumPy has no {tensor.dtype} tensor like this") from error
        on_host.requires_grad_(tensor.requires_grad)
        header, frames = theirs.serialize_torch_Tensor(on_host)
        return {**header, "device": "cuda"}, frames

    take_apart = dask_serialize.dispatch(torch.nn.Module)

    def serialize_module(module: Any) -> Serialized:
        if any(part.is_cuda for part in (*module.parameters(), *module.buffers())):
            raise NotImplementedError("taken apart, it would lose what its parts share")
        return take_apart(module)  # type: ignore[no-any-return]

    dask_serialize.register(torch.Tensor, serialize_tensor)
    dask_serialize.register(torch.nn.Module, serialize_module)


@functools.cache
def _register_numba() -> None:
    import numpy
    from distributed.protocol import numba as theirs
    from distributed.protocol.cuda import cuda_serialize
    from numba import cuda

    def of_any_layout(serialize: Callable[[Any], Serialized]) -> Callable[[Any], Serialized]:
        def serialize_array(array: Any) -> Serialized:
            if array.flags["C_CONTIGUOUS"] or array.flags["F_CONTIGUOUS"]:
                return serialize(array)
            # Through host memory: a copy on the device takes a kernel, which Numba compiles.
            host = numpy.ascontiguousarray(array.copy_to_host())
            ordinal = array.gpu_data.context.device.id
            with Device(ordinal), cuda.gpus[ordinal]:
                return serialize(cuda.to_device(host))

        return serialize_array

    kind = cuda.devicearray.DeviceNDArray
    dask_serialize.register(kind, of_any_layout(theirs.dask_serialize_numba_ndarray))
    cuda_serialize.register(kind, of_any_layout(theirs.cuda_serialize_numba_ndarray))
