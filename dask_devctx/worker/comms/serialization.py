"""Serialization of values on a device that distributed sends wrongly or not at all.

- distributed takes a tensor's memory for host memory. It takes a module apart into its attributes,
  so that a tensor which two attributes share arrives as two tensors.
- distributed refuses Numba's arrays with gaps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from distributed.protocol import dask_deserialize, dask_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize

from dask_devctx.cuda.device import Device
from dask_devctx.dask_internals.connections import register_instead

Serialized = tuple[dict[str, Any], list[Any]]
Serialize = Callable[[Any], Serialized]


def register() -> None:
    """Let distributed send torch's and Numba's values on devices, once the library is imported."""
    # The values go through host memory and arrive on the device that is current where they are
    # unpacked. Tensors of a type that NumPy does not have, such as ``bfloat16``, are sent as bytes:
    # the receiver needs this registration too. torch itself pickles sparse tensors and modules:
    # they arrive on the device of the same number. This lasts as long as the process.
    for library, with_it in (("torch", _register_torch), ("numba", _register_numba)):
        # The first registry that is used makes the library's registrations in all four.
        for registry in (dask_serialize, dask_deserialize, cuda_serialize, cuda_deserialize):
            registry.register_lazy(library, with_it)
        if f"distributed.protocol.{library}" in sys.modules:  # then no lazy registration runs
            with_it()


def _only_for_us(header: dict[str, Any], frames: list[Any]) -> Serialized:
    # distributed alone would take the bytes for numbers. Its function for tensors reads a
    # "gradient" first, and then fails with the text.
    text = (
        f"a tensor of torch.{header['dtype']} arrived as bytes, because NumPy does not have this "
        "type, and this process cannot unpack it: create a dask_devctx.DevicePlugin here first, or "
        "let the task return another type, such as x.float()"
    )
    ours = {"sub-header": header["sub-header"], "grad": False}
    refusal = {
        "sub-header": {"serializer": "error"},
        "grad": {"header": ours["sub-header"], "start": 1},
    }
    return {**header, **refusal, "ours": ours}, [text.encode(), *frames]


@functools.cache
def _register_torch() -> None:
    import torch
    from distributed.protocol import torch as theirs
    from distributed.protocol.serialize import dask_object_with_dict_serializer

    def serialize_tensor(tensor: Any) -> Serialized:
        numpys = is_numpys(tensor)
        if numpys and not tensor.is_cuda:
            return theirs.serialize_torch_Tensor(tensor)  # type: ignore[no-any-return]
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            raise NotImplementedError("torch pickles it")
        on_host = tensor.detach().cpu().resolve_conj().resolve_neg()
        more: dict[str, Any] = {"device": "cuda" if tensor.is_cuda else "cpu"}
        if not numpys:
            more |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tensor.shape}
            on_host = on_host.contiguous().view(-1).view(torch.uint8)
        header, frames = theirs.serialize_torch_Tensor(on_host)
        header |= {**more, "requires_grad": tensor.requires_grad}
        return (header, frames) if numpys else _only_for_us(header, frames)

    def deserialize_tensor(header: dict[str, Any], frames: list[Any]) -> Any:
        if "dtype" not in header:
            return theirs.deserialize_torch_Tensor(header, frames)
        header, frames = {**header, **header["ours"]}, frames[1:]
        flat = theirs.deserialize_torch_Tensor({**header, "requires_grad": False}, frames)
        tensor = flat.view(getattr(torch, header["dtype"])).view(header["shape"])
        return tensor.requires_grad_(header["requires_grad"])

    def is_numpys(tensor: Any) -> bool:
        try:
            torch.empty(0, dtype=tensor.dtype, layout=tensor.layout).numpy()
        except (TypeError, RuntimeError):
            return False
        return True

    def serialize_module(module: Any) -> Serialized:
        base = torch.nn.Module  # a subclass may have other functions of these names
        known = "_parameters" in vars(module)  # it is initialised
        tensors = [*base.parameters(module), *base.buffers(module)] if known else []
        if any(tensor.is_cuda for tensor in tensors):
            raise NotImplementedError("torch pickles it: taken apart, it loses what it shares")
        return dask_object_with_dict_serializer.serialize(module)  # type: ignore[no-any-return]

    register_instead(dask_serialize, torch.Tensor, serialize_tensor)
    register_instead(dask_deserialize, torch.Tensor, deserialize_tensor)
    register_instead(dask_serialize, torch.nn.Module, serialize_module)


@functools.cache
def _register_numba() -> None:
    import numpy
    from distributed.protocol import numba as theirs
    from numba import cuda

    def of_any_layout(serialize: Serialize) -> Serialize:
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
    register_instead(dask_serialize, kind, of_any_layout(theirs.dask_serialize_numba_ndarray))
    register_instead(cuda_serialize, kind, of_any_layout(theirs.cuda_serialize_numba_ndarray))
