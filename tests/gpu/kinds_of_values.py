"""Values that people pass from task to task: how each is made, used and compared.

A kind is made on the device that is current, and used on the device of the task that it is given
to. What its use gives is on the host, and the same wherever it was used.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """One kind of value."""

    name: str
    make: Callable[[], Any]
    use: Callable[[Any], Any]
    needs: tuple[str, ...] = ()
    check: Callable[[Any, Any], bool] = lambda here, there: same(here, there)
    may_be_refused: bool = False
    on_device: bool = True

    @property
    def missing(self) -> str:
        """The first of its libraries that is not there, or nothing."""
        modules = (self.name.split()[0], *self.needs)
        return next((name for name in modules if importlib.util.find_spec(name) is None), "")


def same(here: Any, there: Any) -> bool:
    """Return whether two results are the same, numbers up to rounding."""
    if isinstance(here, float) and isinstance(there, float):
        return math.isclose(here, there, rel_tol=1e-4, abs_tol=1e-5)
    if isinstance(here, (list, tuple)) and isinstance(there, (list, tuple)):
        return len(here) == len(there) and all(map(same, here, there))
    return bool(here == there)


def _torch() -> Any:
    import torch

    return torch


def _on() -> dict[str, str]:
    return {"device": "cuda"}


def _x() -> Any:
    """Return a tensor of 4 by 6."""
    return _torch().arange(24.0, **_on()).reshape(4, 6) / 7


def _numbers(tensor: Any) -> Any:
    """Return a tensor's elements after some work on the current device, which has to be its own."""
    torch = _torch()
    assert tensor.device == torch.device("cuda", torch.cuda.current_device()), tensor.device
    tensor = tensor.detach()
    if tensor.is_sparse or tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        tensor = tensor.to(torch.int64)
    if tensor.is_floating_point():
        tensor = tensor.float()
    return (tensor + torch.ones_like(tensor)).cpu().tolist()


def _all(value: Any) -> Any:
    return [_numbers(part) for part in value]


def _tensor(name: str, make: Callable[[], Any], **more: Any) -> Kind:
    return Kind(f"torch {name}", make, _numbers, **more)


_DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2"),
]


def _dtype(name: str) -> Kind:
    def use(tensor: Any) -> Any:
        torch = _torch()
        assert tensor.device.index == torch.cuda.current_device()
        assert str(tensor.dtype) == f"torch.{name}"
        return tensor.contiguous().view(torch.uint8).cpu().tolist()

    return Kind(f"torch {name}", lambda: _x().to(getattr(_torch(), name)), use)


def _model() -> Any:
    torch = _torch()
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).cuda()


def _trained(value: dict[str, Any]) -> Any:
    """Train for two steps; the loss falls only where model, optimizer and scheduler share."""
    torch = _torch()
    model, optimizer = value["model"], value["optimizer"]
    mine = {id(parameter) for parameter in model.parameters()}
    assert all(id(p) in mine for group in optimizer.param_groups for p in group["params"])
    if "scheduler" in value:
        assert value["scheduler"].optimizer is optimizer
    losses = []
    # The value is other tasks' too: this one trains a copy.
    own = copy.deepcopy({"model": model, "optimizer": optimizer.state_dict()})
    again = type(optimizer)(own["model"].parameters(), lr=0.1)
    again.load_state_dict(own["optimizer"])
    for _ in range(2):
        loss = own["model"](torch.ones(2, 6, device="cuda")).square().mean()
        again.zero_grad()
        loss.backward()
        again.step()
        losses.append(loss.item())
    return [*losses, optimizer.param_groups[0]["lr"], [_numbers(p) for p in model.parameters()]]


def _training(*, scheduler: bool = False) -> dict[str, Any]:
    torch = _torch()
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 6, device="cuda")).sum().backward()
    optimizer.step()
    value = {"model": model, "optimizer": optimizer}
    if scheduler:
        value["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return value


def _shared() -> dict[str, Any]:
    model = _model()
    return {"model": model, "weight": model[0].weight, "again": [model[0].weight]}


def _use_shared(value: dict[str, Any]) -> Any:
    assert value["model"][0].weight is value["weight"] is value["again"][0]
    return _numbers(value["weight"])


def _object(**attributes: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(**attributes)


class Holder:
    """A plain object of a user's."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.by_name = dict(zip("abc", parts, strict=False))


def _generator() -> Any:
    torch = _torch()
    return torch.Generator(f"cuda:{torch.cuda.current_device()}").manual_seed(5)


def _use_generator(generator: Any) -> Any:
    torch = _torch()
    own = torch.Generator("cuda")
    own.set_state(generator.get_state())
    assert generator.device.index == torch.cuda.current_device()
    return torch.rand(4, generator=own, device="cuda").cpu().tolist()


def _nested(layout: str) -> Any:
    torch = _torch()
    parts = [torch.ones(2, 3, **_on()), 2 * torch.ones(4, 3, **_on())]
    return torch.nested.nested_tensor(parts, layout=getattr(torch, layout))


def _packed() -> Any:
    torch = _torch()
    return torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2, **_on()), torch.ones(2, 2, **_on())])


def _sparse(to: str, *args: Any) -> Callable[[], Any]:
    return lambda: getattr(_x() * (_x() > 1), to)(*args)


def _lstm() -> Any:
    torch = _torch()
    torch.manual_seed(2)
    return torch.nn.LSTM(6, 2, batch_first=True).cuda()


def _use_lstm(module: Any) -> Any:
    return _numbers(module(_torch().ones(1, 4, 6, device="cuda"))[0])


def _scripted() -> Any:
    return _torch().jit.script(_model())


def _run(module: Any) -> Any:
    return _numbers(module(_torch().ones(2, 6, device="cuda")))


def _with_gradient() -> Any:
    torch = _torch()
    parameter = torch.nn.Parameter(_x())
    parameter.square().sum().backward()
    return parameter


def _encoding() -> Any:
    from transformers import BatchEncoding

    torch = _torch()
    return BatchEncoding({"input_ids": torch.arange(6, **_on()), "mask": torch.ones(6, **_on())})


def _graph() -> Any:
    from torch_geometric.data import Data

    torch = _torch()
    edges = torch.tensor([[0, 1, 1], [1, 0, 2]], **_on())
    return Data(x=_x(), edge_index=edges)


def _hetero() -> Any:
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["paper"].x = _x()
    return data


def _graphs() -> Any:
    from torch_geometric.data import Batch

    return Batch.from_data_list([_graph(), _graph()])


def _model_output() -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=_x(), hidden_states=(_x(), _x()))


def _use_model_output(value: Any) -> Any:
    assert value.last_hidden_state is value["last_hidden_state"]
    return [_numbers(value.last_hidden_state), _all(value.hidden_states)]


def _cache() -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(_x().reshape(1, 2, 3, 4), _x().reshape(1, 2, 3, 4), 0)
    return cache


def _schedule() -> Any:
    torch = _torch()
    optimizer = torch.optim.SGD([torch.nn.Parameter(_x())], lr=0.5, momentum=0.9)
    kinds = torch.optim.lr_scheduler
    parts = [kinds.ConstantLR(optimizer), kinds.ExponentialLR(optimizer, gamma=0.5)]
    return kinds.SequentialLR(optimizer, parts, [2])


def _use_schedule(schedule: Any) -> Any:
    assert all(part.optimizer is schedule.optimizer for part in schedule._schedulers)
    return [_all(schedule.optimizer.param_groups[0]["params"]), schedule.get_last_lr()]


def _with_device() -> Any:
    return Sampler(_x())


class Sampler:
    """An object that keeps its device's name beside what is there."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.device = weights.device

    def to(self, device: Any) -> Sampler:
        self.weights, self.device = self.weights.to(device), device
        return self

    def sample(self) -> Any:
        return self.weights + _torch().ones(6, device=self.device)


_TORCH = [
    _tensor("tensor", _x),
    _tensor("strided view", lambda: _x()[::2, ::3]),
    _tensor("transposed", lambda: _x().T),
    _tensor("expanded", lambda: _x()[:1].expand(4, 6)),
    _tensor("no elements", lambda: _x()[:0], on_device=False),
    _tensor("scalar", lambda: _x().sum()),
    _tensor("complex", lambda: _x() * (1 + 2j)),
    _tensor("conjugated view", lambda: (_x() * 1j).conj()),
    _tensor("negated view", lambda: (_x() * 1j).conj().imag),
    _tensor("requires grad", lambda: _x().requires_grad_()),
    _tensor("with a history", lambda: _x().requires_grad_() * 2),
    _tensor(
        "channels last", lambda: _x().reshape(1, 2, 3, 4).to(memory_format=_torch().channels_last)
    ),
    _tensor("sparse COO", _sparse("to_sparse")),
    _tensor("sparse CSR", _sparse("to_sparse_csr")),
    _tensor("sparse CSC", _sparse("to_sparse_csc")),
    _tensor("sparse BSR", _sparse("to_sparse_bsr", (2, 2))),
    _tensor("parameter", lambda: _torch().nn.Parameter(_x())),
    Kind(
        "torch parameter with gradient", _with_gradient, lambda p: [_numbers(p), _numbers(p.grad)]
    ),
    *map(_dtype, _DTYPES),
    Kind("torch return_types.max", lambda: _torch().max(_x(), 1), _all),
    Kind("torch return_types.sort", lambda: _torch().sort(_x(), 1), _all),
    Kind("torch return_types.topk", lambda: _torch().topk(_x(), 2), _all),
    Kind("torch return_types.svd", lambda: _torch().linalg.svd(_x()), lambda v: _numbers(v.S)),
    Kind("torch return_types.qr", lambda: _torch().linalg.qr(_x()), _all),
    Kind("torch packed sequence", _packed, lambda v: [_numbers(v.data), v.batch_sizes.tolist()]),
    Kind("torch nested, strided", lambda: _nested("strided"), lambda v: _all(v.unbind())),
    Kind("torch nested, jagged", lambda: _nested("jagged"), lambda v: _all(v.unbind())),
    Kind("torch state dict", lambda: _model().state_dict(), lambda v: _all(v.values())),
    Kind("torch module", _model, _run),
    Kind("torch recurrent module", _lstm, _use_lstm),
    Kind("torch scripted module", _scripted, _run),
    Kind("torch model and optimizer", _training, _trained),
    Kind("torch model, optimizer, scheduler", lambda: _training(scheduler=True), _trained),
    Kind("torch shared parameter", _shared, _use_shared),
    Kind("torch generator", _generator, _use_generator, on_device=False),
    Kind(
        "torch distribution",
        lambda: _torch().distributions.Normal(_x(), _torch().ones_like(_x())),
        lambda v: _numbers(v.log_prob(_torch().ones(6, device="cuda"))),
    ),
    Kind(
        "torch multivariate distribution",
        lambda: _torch().distributions.MultivariateNormal(
            _torch().zeros(3, **_on()), _torch().eye(3, **_on())
        ),
        lambda v: _numbers(v.log_prob(_torch().ones(3, device="cuda"))),
    ),
    Kind("torch dataset", lambda: _torch().utils.data.TensorDataset(_x()), lambda v: _all(v[1])),
    Kind("torch namespace", lambda: _object(x=_x(), n=1), lambda v: [_numbers(v.x), v.n]),
    Kind("torch in an object", lambda: Holder(_x(), 2), lambda v: _numbers(v.by_name["a"])),
    Kind(
        "torch and numbers nested",
        lambda: [{"a": (_x(), [_x()])}, 1],
        lambda v: [_numbers(v[0]["a"][0]), _numbers(v[0]["a"][1][0]), v[1]],
    ),
    Kind("torch schedule of schedules", _schedule, _use_schedule),
    Kind("torch object with its device", _with_device, lambda v: _numbers(v.sample())),
    Kind(
        "torch LBFGS",
        lambda: _torch().optim.LBFGS([_torch().nn.Parameter(_x())]),
        lambda v: _all(v._params),
    ),
    Kind("torch ModelOutput", _model_output, _use_model_output, ("transformers",)),
    Kind("torch DynamicCache", _cache, lambda v: _numbers(v.layers[0].keys), ("transformers",)),
    Kind(
        "torch geometric HeteroData",
        _hetero,
        lambda v: _numbers(v["paper"].x),
        ("torch_geometric",),
    ),
    Kind(
        "torch geometric Batch",
        _graphs,
        lambda v: [_numbers(v.x), v.num_graphs],
        ("torch_geometric",),
    ),
    Kind("torch BatchEncoding", _encoding, lambda v: _all(v.data.values()), ("transformers",)),
    Kind(
        "torch geometric Data",
        _graph,
        lambda v: [_numbers(v.x), _numbers(v.edge_index), v.num_nodes],
        ("torch_geometric",),
    ),
]


def _cupy() -> Any:
    import cupy

    return cupy


def _c() -> Any:
    return _cupy().arange(24.0).reshape(4, 6) / 7


def _host(array: Any) -> Any:
    cupy = _cupy()
    assert array.device.id == cupy.cuda.Device().id, array.device
    array = (array + 0).get()
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    return array.tolist()


def _csr(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        from cupyx.scipy import sparse

        if kind == "dia":
            return sparse.dia_matrix((_c()[:2], _cupy().asarray([0, 1])), shape=(6, 6))
        return sparse.csr_matrix(_c() * (_c() > 1)).asformat(kind)

    return make


def _kernel() -> Any:
    source = 'extern "C" __global__ void twice(double* x) { x[threadIdx.x] *= 2; }'
    return {"kernel": _cupy().RawKernel(source, "twice"), "x": _c()}


def _use_kernel(value: dict[str, Any]) -> Any:
    own = value["x"].copy()
    value["kernel"]((1,), (own.size,), (own,))
    return _host(own)


_CUPY = [
    Kind("cupy array", _c, _host),
    Kind("cupy Fortran order", lambda: _cupy().asfortranarray(_c()), _host),
    Kind("cupy strided view", lambda: _c()[::2, ::3], _host),
    Kind("cupy reversed view", lambda: _c()[::-1], _host),
    Kind("cupy broadcast", lambda: _cupy().broadcast_to(_c()[0], (3, 6)), _host),
    Kind("cupy complex", lambda: _c() * 1j, _host),
    Kind("cupy bool", lambda: _c() > 1, lambda v: v.get().tolist()),
    Kind("cupy float16", lambda: _c().astype("float16"), _host),
    Kind("cupy no elements", lambda: _c()[:0], _host, on_device=False),
    *[
        Kind(f"cupy sparse {kind}", _csr(kind), lambda v: _host(v.toarray()), ("cupyx",))
        for kind in ("csr", "csc", "coo", "dia")
    ],
    Kind("cupy raw kernel beside an array", _kernel, _use_kernel),
    Kind(
        "cupy dict of many",
        lambda: {i: _c()[0, :1] + i for i in range(500)},
        lambda v: sum(_host(x)[0] for x in v.values()),
    ),
    Kind("cupy in an object", lambda: Holder(_c(), "host"), lambda v: _host(v.parts[0])),
    Kind(
        "cupy random generator",
        lambda: _cupy().random.default_rng(1),
        lambda v: _host(v.random(3)),
        check=lambda here, there: len(there) == 3,
        may_be_refused=True,
        on_device=False,
    ),
    Kind(
        "cupy poly1d",
        lambda: _cupy().poly1d(_c()[0]),
        lambda v: _host(v.coeffs),
        may_be_refused=True,
        on_device=False,
    ),
]


def _numba(order: str = "C") -> Any:
    import numpy
    from numba import cuda

    return cuda.to_device(numpy.arange(24.0).reshape((4, 6), order=order))


def _jax() -> Any:
    import jax

    from dask_devctx import Device

    device = Device.current()
    assert device is not None
    found = next(d for d in jax.local_devices() if d.local_hardware_id == device.device_id)
    return jax.device_put(jax.numpy.arange(24.0).reshape(4, 6), found)


def _use_jax(array: Any) -> Any:
    from dask_devctx import Device

    (device,) = array.devices()
    current = Device.current()
    assert current is not None
    assert device.local_hardware_id == current.device_id
    return importlib.import_module("numpy").asarray(array + 1).tolist()


_OTHERS = [
    Kind("numba array", _numba, lambda v: v.copy_to_host().tolist()),
    Kind("numba strided view", lambda: _numba()[::2, ::3], lambda v: v.copy_to_host().tolist()),
    Kind("numba Fortran order", lambda: _numba("F"), lambda v: v.copy_to_host().tolist()),
    Kind("jax array", _jax, _use_jax),
    Kind("jax nested", lambda: {"a": [_jax()]}, lambda v: _use_jax(v["a"][0])),
]

KINDS = {kind.name: kind for kind in [*_TORCH, *_CUPY, *_OTHERS]}


# -- what runs in workers


def make(name: str) -> Any:
    """Return a value of a kind, on the current device."""
    return KINDS[name].make()


def use(name: str, value: Any) -> Any:
    """Return what the use of a value gives on the current device."""
    return KINDS[name].use(value)


def where(value: Any) -> list[int]:
    """Return the ordinals of the devices that a value is on."""
    from dask_devctx.transfer import nbytes_by_device

    return sorted(device.device_id for device in nbytes_by_device(value))
