"""torch's tensors, parameters, modules and optimizers.

A tensor's bytes are copied on the destination's current stream. torch's own ``to`` copies on the
source's and makes it wait for the destination: a device that produces would be slowed down by the
one that consumes. Where a tensor has a history (``grad_fn``), ``to`` is what keeps it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.location import device_of, nbytes_by_device
from dask_devctx.transfer.move import current_move, to_device
from dask_devctx.transfer.peers import copy_bytes
from dask_devctx.transfer.streams import torch_stream


def _device_of(tensor: Any) -> Device | None:
    return Device(tensor.device.index) if tensor.device.type == "cuda" else None


def _tensor_bytes(tensor: Any) -> dict[Device, int]:
    device = _device_of(tensor)
    if device is None:
        return {}
    return {device: sum(int(part.nbytes) for part in _stored(tensor))}


def _stored(tensor: Any) -> tuple[Any, ...]:
    """Return the tensors that hold a tensor's elements: of a sparse one it has no size itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _tensor_to_device(tensor: Any, device: Device) -> Any:
    ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if tensor.grad_fn is not None or not ordinary or tensor.is_conj():
        moved = _by_torch(tensor, device)
    else:
        plain = tensor.detach()
        moved = _copied(plain, device) if _is_dense(plain) else _by_torch(plain, device)
        moved.requires_grad_(tensor.requires_grad)
    return moved


def _by_torch(tensor: Any, device: Device) -> Any:
    move = current_move()
    source = Device(tensor.device.index)
    move.order(source, on_source=True)  # torch copies on the source's current stream
    return tensor.to(torch.device("cuda", device.device_id), non_blocking=True, copy=True)


def _copied(tensor: Any, device: Device) -> Any:
    moved = torch.empty_strided(
        tensor.size(),
        tensor.stride(),
        dtype=tensor.dtype,
        device=torch.device("cuda", device.device_id),
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


def _is_dense(tensor: Any) -> bool:
    """Return whether its elements fill a stretch of memory in some order of the axes."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return not tensor.numel()
        expected *= length
    return not tensor.is_neg()


def _parameter_to_device(parameter: Any, device: Device) -> Any:
    moved = torch.nn.Parameter(
        _tensor_to_device(parameter.detach(), device), requires_grad=parameter.requires_grad
    )
    if parameter.grad is not None:
        moved.grad = to_device(parameter.grad, device)
    return moved


# -- modules and optimizers are made anew around what moves: the source keeps its own


def module_tensors(module: Any) -> list[Any]:
    """Return a module's parameters and buffers; none of one that was not initialised."""
    if "_parameters" not in vars(module):
        return []
    kind = torch.nn.Module  # a subclass may have other functions of these names
    return [*kind.parameters(module), *kind.buffers(module)]


def _module_bytes(module: Any) -> dict[Device, int]:
    return nbytes_by_device(module_tensors(module))


def _module_to_device(module: Any, device: Device) -> Any:
    moved: Any = object.__new__(type(module))
    current_move().remember(module, moved)  # a submodule may know its parent
    for name, value in vars(module).items():
        there = to_device(value, device)
        # Parameters, submodules and hooks are kept in collections that each module owns.
        moved.__dict__[name] = copy.copy(there) if name in _OWNED and there is value else there
    return moved


_OWNED = frozenset(
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, (dict, set))
)


def _optimizer_bytes(optimizer: Any) -> dict[Device, int]:
    return nbytes_by_device([optimizer.param_groups, optimizer.state])


def _optimizer_to_device(optimizer: Any, device: Device) -> Any:
    moved: Any = object.__new__(type(optimizer))
    # As it is pickled: what a scheduler hung onto it stays behind.
    moved.__setstate__(to_device(optimizer.__getstate__(), device))
    return moved


def register() -> None:
    """Make torch's types known."""
    device_of.register(torch.Tensor, _device_of)
    nbytes_by_device.register(torch.Tensor, _tensor_bytes)
    to_device.register(torch.Tensor, _tensor_to_device)
    to_device.register(torch.nn.Parameter, _parameter_to_device)
    nbytes_by_device.register(torch.nn.Module, _module_bytes)
    to_device.register(torch.nn.Module, _module_to_device)
    nbytes_by_device.register(torch.optim.Optimizer, _optimizer_bytes)
    to_device.register(torch.optim.Optimizer, _optimizer_to_device)
