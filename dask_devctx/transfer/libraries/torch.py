"""torch's tensors, parameters, modules and optimizers.

The destination's current stream copies a tensor's bytes. torch's own ``to`` copies on the source's
stream and makes it wait for the destination: the consumer would slow down the producer. A tensor
with a history (``grad_fn``) still goes by ``to``, which keeps the history.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from typing import Any

import torch

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.events import torch_stream
from dask_devctx.transfer.libraries import Library, known
from dask_devctx.transfer.location import Memory
from dask_devctx.transfer.move import to_device
from dask_devctx.transfer.parcel import Parcel, Part, Reduce
from dask_devctx.transfer.rebuild import reduced
from dask_devctx.transfer.traffic import copy_bytes, is_dense, thread

# -- tensors


def _stored(tensor: Any) -> tuple[Any, ...]:
    """Return the tensors that hold a tensor's elements: sparse and nested tensors have several."""
    if torch.nn.parameter.is_lazy(tensor):
        return ()
    if tensor.is_nested:
        return tensor.unbind()  # type: ignore[no-any-return]
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _bytes(tensor: Any) -> dict[Device, int]:
    if tensor.device.type != "cuda":
        return {}
    return {Device(tensor.device.index): sum(int(part.nbytes) for part in _stored(tensor))}


def _memory_of(tensor: Any) -> Memory | None:
    stored = _stored(tensor)
    if tensor.device.type != "cuda" or not stored:
        return None
    device = Device(tensor.device.index)
    if len(stored) > 1:  # rare: it counts alone
        return Memory(device, 0, sum(int(part.nbytes) for part in stored))
    storage = stored[0].untyped_storage()
    return Memory(device, storage.data_ptr(), storage.nbytes())


def _to_device(tensor: Any, device: Device) -> Any:
    ordinary = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj())
    )
    if not ordinary or tensor.grad_fn is not None:
        return _by_torch(tensor, device)
    plain = tensor.detach()
    as_it_is = is_dense(plain.stride(), plain.size()) and not plain.is_neg()
    moved = _copied(plain, device) if as_it_is else _by_torch(plain, device)
    moved.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf and tensor.grad is not None:
        moved.grad = to_device(tensor.grad, device)
    return moved


def _by_torch(tensor: Any, device: Device) -> Any:
    # torch copies on the source's current stream.
    thread.move.order(Device(tensor.device.index), on_source=True)
    return tensor.to(_name_of(device), non_blocking=True, copy=True)


def _copied(tensor: Any, device: Device) -> Any:
    moved = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_name_of(device)
    )
    copy_bytes(
        moved.data_ptr(),
        device,
        tensor.data_ptr(),
        Device(tensor.device.index),
        tensor.numel() * tensor.element_size(),
        torch_stream(device.device_id),
    )
    return moved


def _to_host(tensor: Any) -> Any:
    if tensor.grad_fn is not None:
        return tensor.cpu()
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


def _name_of(device: Device) -> Any:
    return torch.device("cuda", device.device_id)


def _around(elements: Any, parameter: Any, device: object) -> Any:
    moved = torch.nn.Parameter(elements, requires_grad=parameter.requires_grad)
    moved.__dict__.update(vars(parameter))
    if parameter.grad is not None:
        moved.grad = to_device(parameter.grad, device)
    return moved


# -- modules, optimizers and schedulers: new ones hold the moved tensors, the source stays unchanged


def _by_attributes(value: Any) -> Any:
    """Reduce an object to its attributes: an optimizer's pickle lacks state that it needs."""
    own = {
        name: copy.copy(part) if type(part) in (dict, OrderedDict, set) else part
        for name, part in vars(value).items()
        # An optimizer steps by its class: an LR scheduler's function would step the source.
        if not (name == "step" and hasattr(part, "_wrapped_by_lr_sched"))
    }
    return object.__new__, (type(value),), own, None, None, _set_attributes


def _set_attributes(made: Any, attributes: dict[str, Any]) -> None:
    vars(made).update(attributes)


# -- packed: torch itself pickles a tensor around its storage. So every type and layout arrives that
# torch can pickle, and tensors that share a storage still share it afterwards.


def pickled_by(kind: type) -> Reduce | None:
    """Return the function that pickles a type of torch without its device memory, or None."""
    if issubclass(kind, torch.Tensor):
        return _tensor
    if issubclass(kind, torch.storage.TypedStorage):
        return _typed
    if issubclass(kind, torch.UntypedStorage):
        return _untyped
    return None


def _tensor(tensor: Any, parcel: Parcel) -> Any:
    if not tensor.is_cuda:
        return NotImplemented
    if type(tensor) is torch.Tensor and tensor.dtype in _unreadable():
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        made = _set_around, (tensor.untyped_storage(), tensor.dtype, *layout, tensor.requires_grad)
    elif tensor.is_leaf and tensor.grad is not None:
        made = tensor.__reduce_ex__(5)  # it leaves the gradient out
    else:
        return NotImplemented
    if not tensor.is_leaf or tensor.grad is None:
        return made
    return (*made[:2], tensor.grad, None, None, _set_grad)


@functools.cache
def _unreadable() -> frozenset[Any]:
    """Return the types of which torch pickles a tensor so that only ``torch.load`` can read it."""
    named = ("float8", "float4", "uint", "bits")
    found = (dtype for name, dtype in vars(torch).items() if name.startswith(named))
    return frozenset(one for one in found if isinstance(one, torch.dtype)) - {torch.uint8}


def _set_around(
    storage: Any, dtype: Any, offset: int, size: Any, stride: Any, requires_grad: bool
) -> Any:
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, size, stride).requires_grad_(requires_grad)


def _set_grad(tensor: Any, grad: Any) -> None:
    tensor.grad = grad


def _typed(storage: Any, parcel: Parcel) -> Any:
    inner = storage._untyped_storage
    if inner.device.type != "cuda":
        return NotImplemented
    return _as_typed, (_part(inner, parcel), storage.dtype)


def _as_typed(memory: Any, dtype: Any) -> Any:
    storage = memory.untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(storage: Any, parcel: Parcel) -> Any:
    if storage.device.type != "cuda":
        return NotImplemented
    return torch.Tensor.untyped_storage, (_part(storage, parcel),)


def _part(storage: Any, parcel: Parcel) -> object:
    return parcel.add(Part(storage.data_ptr(), storage.nbytes(), "torch", None, storage))


LIBRARY = Library(
    torch.Tensor,
    lambda tensor: int(tensor.data_ptr()),
    lambda shape, dtype, device: torch.empty(
        shape, dtype=torch.uint8 if dtype is None else dtype, device=_name_of(device)
    ),
    lambda tensor: tensor.detach().resolve_conj().resolve_neg().contiguous(),
)
known(torch.Tensor, nbytes=_bytes, move=_to_device, host=_to_host, memory=_memory_of)
known(
    torch.nn.Parameter,
    move=lambda one, device: _around(_to_device(one.detach(), device), one, device),
    host=lambda one: _around(one.detach().cpu(), one, "cpu"),
)
reduced[torch.nn.Module] = reduced[torch.optim.Optimizer] = _by_attributes
