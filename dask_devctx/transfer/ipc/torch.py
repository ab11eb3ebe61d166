"""torch's storages: the memory under tensors of every type and layout, shared as it was.

A tensor is pickled by torch itself, around its storage. So each type and layout arrives that torch
can pickle, and what looked at one storage does so afterwards.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from dask_devctx.transfer.ipc.frames import Part
from dask_devctx.transfer.ipc.parcel import Parts, Reduce


def find(kind: type) -> Reduce | None:
    """Return how a type of torch's is pickled without its memory on a device."""
    if issubclass(kind, torch.Tensor):
        return _tensor
    if issubclass(kind, torch.storage.TypedStorage):
        return _typed
    if issubclass(kind, torch.UntypedStorage):
        return _untyped
    return None


def _tensor(tensor: Any, parts: Parts) -> Any:
    if not tensor.is_cuda:
        return NotImplemented
    if type(tensor) is torch.Tensor and tensor.dtype in _UNREADABLE:
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        made = _around, (tensor.untyped_storage(), tensor.dtype, *layout, tensor.requires_grad)
    elif tensor.is_leaf and tensor.grad is not None:
        made = tensor.__reduce_ex__(5)  # it leaves the gradient out
    else:
        return NotImplemented
    if not tensor.is_leaf or tensor.grad is None:
        return made
    return (*made[:2], tensor.grad, None, None, _set_grad)


# torch pickles a tensor of these types so that only torch.load can read it.
_UNREADABLE = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and name.startswith(("float8", "float4", "uint", "bits"))
) - {torch.uint8}


def _around(
    storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool
) -> Any:
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, size, stride).requires_grad_(requires_grad)


def _set_grad(tensor: Any, grad: Any) -> None:
    tensor.grad = grad


def _typed(storage: Any, parts: Parts) -> Any:
    inner = storage._untyped_storage
    if inner.device.type != "cuda":
        return NotImplemented
    return _as_typed, (_place(inner, parts), storage.dtype)


def _as_typed(storage: Any, dtype: Any) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(storage: Any, parts: Parts) -> Any:
    if storage.device.type != "cuda":
        return NotImplemented
    return operator.itemgetter(0), ((_place(storage, parts),),)


def _place(storage: Any, parts: Parts) -> object:
    return parts.add(Part(storage.data_ptr(), storage.nbytes(), "torch", None, storage))
