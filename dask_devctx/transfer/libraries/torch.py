"""torch's tensors, parameters, modules, optimizers and generators.

The destination's current stream copies a tensor's bytes. torch's own ``to`` copies on the source's
stream and makes it wait for the destination: the consumer would slow down the producer. A tensor
with a history (``grad_fn``) still goes by ``to``, which keeps the history.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from dask_devctx.cuda.device import Device
from dask_devctx.transfer.blocks import Memory, memory_of
from dask_devctx.transfer.host import to_host
from dask_devctx.transfer.location import device_of, nbytes_by_device
from dask_devctx.transfer.move import current_move, to_device
from dask_devctx.transfer.parts import ObjectLike, register_name
from dask_devctx.transfer.peers import copy_bytes
from dask_devctx.transfer.streams import torch_stream
from dask_devctx.transfer.walk import register_protocol


def _device_of(tensor: Any) -> Device | None:
    return Device(tensor.device.index) if tensor.device.type == "cuda" else None


def _tensor_bytes(tensor: Any) -> dict[Device, int]:
    device = _device_of(tensor)
    if device is None:
        return {}
    return {device: sum(int(part.nbytes) for part in _stored(tensor))}


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


def _memory_of(tensor: Any) -> Memory | None:
    device = _device_of(tensor)
    stored = _stored(tensor)
    if device is None or not stored:
        return None
    if len(stored) > 1:  # rare: it counts alone
        return Memory(device, 0, sum(int(part.nbytes) for part in stored))
    storage = stored[0].untyped_storage()
    return Memory(device, storage.data_ptr(), storage.nbytes())


def _tensor_to_device(tensor: Any, device: Device) -> Any:
    ordinary = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
    )
    if tensor.grad_fn is not None or not ordinary or tensor.is_conj():
        moved = _by_torch(tensor, device)
    else:
        plain = tensor.detach()
        moved = _copied(plain, device) if _is_dense(plain) else _by_torch(plain, device)
        moved.requires_grad_(tensor.requires_grad)
    return moved


def _tensor_to_host(tensor: Any) -> Any:
    if tensor.grad_fn is not None:
        return tensor.cpu()
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


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
    """Return whether its elements fill a block of memory in some order of the axes."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return not tensor.numel()
        expected *= length
    return not tensor.is_neg()


def _parameter_to_device(parameter: Any, device: Device) -> Any:
    if torch.nn.parameter.is_lazy(parameter):
        # It has no elements yet, and will make them on the device in its attribute.
        where = torch.device("cuda", device.device_id)
        return type(parameter)(parameter.requires_grad, device=where, dtype=parameter.dtype)
    moved = torch.nn.Parameter(
        _tensor_to_device(parameter.detach(), device), requires_grad=parameter.requires_grad
    )
    moved.__dict__.update(vars(parameter))
    if parameter.grad is not None:
        moved.grad = to_device(parameter.grad, device)
    return moved


def _parameter_to_host(parameter: Any) -> Any:
    moved = torch.nn.Parameter(parameter.detach().cpu(), requires_grad=parameter.requires_grad)
    moved.__dict__.update(vars(parameter))
    if parameter.grad is not None:
        moved.grad = to_device(parameter.grad, "cpu")
    return moved


# -- modules, optimizers and schedulers: new ones hold the moved tensors, the source stays unchanged


def module_tensors(module: Any) -> list[Any]:
    """Return a module's parameters and buffers; an uninitialised module has none."""
    if "_parameters" not in vars(module):
        return []
    kind = torch.nn.Module  # a subclass may have other functions of these names
    return [*kind.parameters(module), *kind.buffers(module)]


class _Owning(ObjectLike):
    """Objects that own their collections of parameters, submodules and hooks.

    A copy is made from the attributes and not from the pickle, which lacks state that an optimizer
    needs.
    """

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        self.by_reduce = self._ends_something = False

    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        own = [copy.copy(part) if type(part) in _COLLECTIONS else part for part in parts]
        super().fill(value, made, own, names)


_COLLECTIONS = frozenset([dict, OrderedDict, set])


class _Optimizer(_Owning):
    def fill(self, value: Any, made: Any, parts: list[Any], names: Sequence[Any]) -> None:
        super().fill(value, made, parts, names)
        if hasattr(vars(made).get("step"), _TRACKED):
            made.step = _tracked_step(made)


# An LR scheduler replaces an optimizer's step, and sets this attribute on the new function.
_TRACKED = "_wrapped_by_lr_sched"


def _tracked_step(optimizer: Any) -> Any:
    """Return a step for this optimizer that its scheduler can see; the old one has another owner.

    References
    ----------
    ``torch.optim.lr_scheduler.LRScheduler``, which warns without such a step.
    """
    function, found = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        one = found()
        assert one is not None
        one._opt_called = True
        return function(one, *args, **kwargs)

    setattr(step, _TRACKED, True)
    return step


def _script_bytes(module: Any) -> dict[Device, int]:
    return nbytes_by_device(module_tensors(module))


def _script_to_device(module: Any, device: Device) -> Any:
    # It keeps its parameters in C++: copy it on its own device, then torch moves the copy.
    move = current_move()
    for source in _script_bytes(module):
        move.order(source, on_source=True)
        with source:
            module = copy.deepcopy(module)
        move.keep(list(module_tensors(module)))
    return module.to(torch.device("cuda", device.device_id))


# -- types without elements to copy


def _generator_device(generator: Any) -> Device | None:
    where = generator.device
    return Device(where.index) if where.type == "cuda" else None


def _generator_to_device(generator: Any, device: Device) -> Any:
    moved = torch.Generator(torch.device("cuda", device.device_id))
    moved.set_state(generator.get_state())
    return moved


def _current_name(where: Any) -> Any:
    current = Device.current()
    if where.type != "cuda" or where.index is None or current is None:
        return where
    return torch.device("cuda", current.device_id)


def register() -> None:
    """Make torch's types known."""
    device_of.register(torch.Tensor, _device_of)
    nbytes_by_device.register(torch.Tensor, _tensor_bytes)
    to_device.register(torch.Tensor, _tensor_to_device)
    to_host.register(torch.Tensor, _tensor_to_host)
    to_device.register(torch.nn.Parameter, _parameter_to_device)
    to_host.register(torch.nn.Parameter, _parameter_to_host)
    register_name(torch.device, _current_name)
    register_protocol(torch.nn.Module, _Owning)
    register_protocol(torch.optim.Optimizer, _Optimizer)
    nbytes_by_device.register(torch.jit.ScriptModule, _script_bytes)
    to_device.register(torch.jit.ScriptModule, _script_to_device)
    device_of.register(torch.Generator, _generator_device)
    to_device.register(torch.Generator, _generator_to_device)
    memory_of.register(torch.Tensor, _memory_of)
