"""Values that people pass from task to task: how each is made and used on the current device.

The result of a use is on the host, and the same wherever the value was used.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from dask_devctx import Device, device_of
from dask_devctx.transfer import nbytes_by_device


class Lazy:
    """A module that is imported where it is used: the table is read where no library is there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # doctest looks at all that a module has
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


torch, cupy, jax, numpy = Lazy("torch"), Lazy("cupy"), Lazy("jax"), Lazy("numpy")
cuda, sparse = Lazy("numba.cuda"), Lazy("cupyx.scipy.sparse")
transformers, geometric = Lazy("transformers"), Lazy("torch_geometric.data")


def numbers(value: Any) -> Any:
    """Return what a value is and has, after some work on the current device, which is its own."""
    if isinstance(value, dict):
        return {str(key): numbers(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers(one) for one in value]
    if isinstance(value, (int, float, str)):
        return value
    assert device_of(value) is Device.current(), (device_of(value), Device.current())
    match type(value).__module__.partition(".")[0]:
        case "torch":
            return _of_tensor(value)
        case "numba":
            return value.copy_to_host().tolist()
        case "jax" | "jaxlib":
            return numpy.asarray(value + 1).tolist()
        case "cupyx":
            return ["sparse", value.format, *numbers(value.toarray())]
    host = (value + 0).get()
    if host.dtype.kind == "c":
        host = host.view(host.real.dtype)
    return [str(value.dtype), host.tolist()]


def _of_tensor(tensor: Any) -> Any:
    said = [type(tensor).__name__, str(tensor.dtype), str(tensor.layout), tensor.requires_grad]
    gradient = numbers(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)
    return [*said, gradient, (tensor + torch.ones_like(tensor)).cpu().tolist()]


class Kind(NamedTuple):
    """One kind of value."""

    make: Callable[[], Any]
    use: Callable[[Any], Any] = numbers
    # Other modules than the library with which its name begins.
    needs: tuple[str, ...] = ()
    on_device: bool = True
    # It can leave its process and its device: dask or its library can pickle it.
    sent: bool = False


def missing(name: str) -> str:
    """Return the first of a kind's libraries that is not there, or nothing."""
    modules = (name.split()[0], *KINDS[name].needs)
    return next((one for one in modules if importlib.util.find_spec(one) is None), "")


def same(here: Any, there: Any) -> bool:
    """Return whether two results are the same, numbers up to rounding."""
    if isinstance(here, float) and isinstance(there, float):
        return math.isclose(here, there, rel_tol=1e-4, abs_tol=1e-5)
    if isinstance(here, (list, tuple)) and isinstance(there, (list, tuple)):
        return len(here) == len(there) and all(map(same, here, there))
    if isinstance(here, dict) and isinstance(there, dict):
        return here.keys() == there.keys() and all(same(here[key], there[key]) for key in here)
    return bool(here == there)


# -- torch


def _t() -> Any:
    return torch.arange(24.0, device="cuda").reshape(4, 6) / 7


def _bytes(tensor: Any) -> Any:
    """For the types that compute little or nothing."""
    assert tensor.device.index == torch.cuda.current_device()
    return [str(tensor.dtype), tensor.contiguous().view(torch.uint8).cpu().tolist()]


def _with_gradient(leaf: Any) -> Any:
    leaf.square().sum().backward()
    return leaf


def _model() -> Any:
    torch.manual_seed(1)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(6, 6), torch.nn.Tanh(), linear(6, 6), linear(6, 1)).cuda()
    model[2].weight = model[0].weight  # tied
    return model


def _lstm() -> Any:
    torch.manual_seed(2)
    return torch.nn.LSTM(6, 2, batch_first=True).cuda()


def _run(model: Any) -> Any:
    if isinstance(model, torch.nn.Sequential):
        assert model[2].weight is model[0].weight
    found = model(torch.ones(1, 2, 6, device="cuda"))
    return numbers(found[0].detach())


def _training() -> dict[str, Any]:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 6, device="cuda")).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _with_scheduler() -> dict[str, Any]:
    value = _training()
    return {**value, "scheduler": torch.optim.lr_scheduler.StepLR(value["optimizer"], 1)}


def _trained(value: dict[str, Any]) -> Any:
    """Train for two steps; the loss falls only where model, optimizer and scheduler share."""
    model, optimizer = value["model"], value["optimizer"]
    mine = {id(parameter) for parameter in model.parameters()}
    assert all(id(p) in mine for group in optimizer.param_groups for p in group["params"])
    assert value.get("scheduler") is None or value["scheduler"].optimizer is optimizer
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
    return [*losses, optimizer.param_groups[0]["lr"], _run(model)]


def _nested(layout: str) -> Any:
    parts = [torch.ones(2, 3, device="cuda"), 2 * torch.ones(4, 3, device="cuda")]
    return torch.nested.nested_tensor(parts, layout=getattr(torch, layout))


def _packed() -> Any:
    parts = [torch.ones(3, 2, device="cuda"), torch.ones(2, 2, device="cuda")]
    return torch.nn.utils.rnn.pack_sequence(parts)


class Holder:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.by_name = dict(zip("abc", parts, strict=False))


def _graph() -> Any:
    edges = torch.tensor([[0, 1, 1], [1, 0, 2]], device="cuda")
    return geometric.Data(x=_t(), edge_index=edges)


def _model_output() -> Any:
    outputs = importlib.import_module("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=_t(), hidden_states=(_t(), _t()))


def _use_model_output(value: Any) -> Any:
    assert value.last_hidden_state is value["last_hidden_state"]
    return numbers([value.last_hidden_state, value.hidden_states])


def _cache() -> Any:
    cache = transformers.DynamicCache()
    cache.update(_t().reshape(1, 2, 3, 4), _t().reshape(1, 2, 3, 4), 0)
    return cache


TENSORS: dict[str, Callable[[], Any]] = {
    "tensor": _t,
    "strided view": lambda: _t()[::2, ::3],
    "conjugated view": lambda: (_t() * 1j).conj(),
    "requires grad": lambda: _t().requires_grad_(),
    "sparse COO": lambda: (_t() * (_t() > 1)).to_sparse(),
    "sparse CSR": lambda: (_t() * (_t() > 1)).to_sparse_csr(),
    "parameter": lambda: torch.nn.Parameter(_t()),
    "with gradient": lambda: _with_gradient(_t().requires_grad_()),
}
# The same within a process only.
TENSORS_OF_A_PROCESS: dict[str, Callable[[], Any]] = {
    "expanded": lambda: _t()[:1].expand(4, 6),
    "parameter with gradient": lambda: _with_gradient(torch.nn.Parameter(_t())),
    "scalar": lambda: _t().sum(),
    "negated view": lambda: (_t() * 1j).conj().imag,
    "with a history": lambda: _t().requires_grad_() * 2,
    "channels last": lambda: _t().reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "sparse CSC": lambda: _t().to_sparse_csc(),
    "return_types.max": lambda: torch.max(_t(), 1),
    "return_types.qr": lambda: torch.linalg.qr(_t()),
    "state dict": lambda: _model().state_dict(),
    "numbers nested": lambda: [{"a": (_t(), [_t()])}, 1],
}
DTYPES = "bool int8 float16 bfloat16 complex64 float8_e4m3fn"
DTYPES_OF_A_PROCESS = (
    "uint8 int16 int32 int64 uint16 uint32 uint64 float32 float64 complex32 complex128 float8_e5m2"
)


def _dtypes(names: str, **more: Any) -> dict[str, Kind]:
    return {
        f"torch {name}": Kind(lambda to=name: _t().to(getattr(torch, to)), _bytes, **more)
        for name in names.split()
    }


_TORCH = {
    **{f"torch {name}": Kind(make, sent=True) for name, make in TENSORS.items()},
    **{f"torch {name}": Kind(make) for name, make in TENSORS_OF_A_PROCESS.items()},
    **_dtypes(DTYPES, sent=True),
    **_dtypes(DTYPES_OF_A_PROCESS),
    "torch transposed": Kind(lambda: _t().T, lambda v: [*numbers(v), *v.stride()], sent=True),
    "torch no elements": Kind(lambda: _t()[:0], on_device=False),
    "torch packed sequence": Kind(_packed, lambda v: [numbers(v.data), v.batch_sizes.tolist()]),
    "torch nested, strided": Kind(lambda: _nested("strided"), lambda v: numbers(v.unbind())),
    "torch nested, jagged": Kind(lambda: _nested("jagged"), lambda v: numbers(v.unbind())),
    "torch svd": Kind(lambda: torch.linalg.svd(_t()), lambda v: numbers(v.S)),
    "torch module": Kind(_model, _run, sent=True),
    "torch recurrent module": Kind(_lstm, _run, sent=True),
    "torch model and optimizer": Kind(_training, _trained, sent=True),
    "torch model, optimizer, scheduler": Kind(_with_scheduler, _trained),
    "torch distribution": Kind(
        lambda: torch.distributions.Normal(_t(), torch.ones_like(_t())),
        lambda v: numbers(v.log_prob(torch.ones(6, device="cuda"))),
    ),
    "torch dataset": Kind(
        lambda: torch.utils.data.TensorDataset(_t()), lambda v: numbers(list(v[1]))
    ),
    "torch namespace": Kind(lambda: SimpleNamespace(x=_t(), n=1), lambda v: numbers([v.x, v.n])),
    "torch in an object": Kind(lambda: Holder(_t(), 2), lambda v: numbers(v.by_name)),
    "torch ModelOutput": Kind(_model_output, _use_model_output, ("transformers",)),
    "torch DynamicCache": Kind(_cache, lambda v: numbers(v.layers[0].keys), ("transformers",)),
    "torch BatchEncoding": Kind(
        lambda: transformers.BatchEncoding({"ids": torch.arange(6, device="cuda")}),
        lambda v: numbers(dict(v.data)),
        ("transformers",),
    ),
    "torch geometric Data": Kind(
        _graph, lambda v: [*numbers([v.x, v.edge_index]), v.num_nodes], ("torch_geometric",)
    ),
}

# -- the others


def _c() -> Any:
    return cupy.arange(24.0).reshape(4, 6) / 7


def _views() -> Any:
    x = _c()
    return {"x": x, "same": [x, x.T]}


def _use_views(value: Any) -> Any:
    x, (same, turned) = value["x"], value["same"]
    assert x is same
    return numbers([x, turned])


def _sparse(kind: str) -> Any:
    if kind == "dia":
        return sparse.dia_matrix((_c()[:2], cupy.asarray([0, 1])), shape=(6, 6))
    return sparse.csr_matrix(_c() * (_c() > 1)).asformat(kind)


def _in_fortran_order(x: Any) -> Any:
    assert x.flags.f_contiguous
    return numbers(x)


def _kernel() -> Any:
    source = 'extern "C" __global__ void twice(double* x) { x[threadIdx.x] *= 2; }'
    return {"kernel": cupy.RawKernel(source, "twice"), "x": _c()}


def _use_kernel(value: dict[str, Any]) -> Any:
    own = value["x"].copy()
    value["kernel"]((1,), (own.size,), (own,))
    return numbers(own)


def _numba(order: str = "C") -> Any:
    return cuda.to_device(numpy.arange(24.0).reshape((4, 6), order=order))


def _jax() -> Any:
    ordinal = Device.current().device_id  # type: ignore[union-attr]
    (found,) = [one for one in jax.local_devices() if one.local_hardware_id == ordinal]
    return jax.device_put(jax.numpy.arange(24.0).reshape(4, 6), found)


KINDS = {
    **_TORCH,
    "cupy array": Kind(_c, sent=True),
    "cupy Fortran order": Kind(lambda: cupy.asfortranarray(_c()), _in_fortran_order, sent=True),
    "cupy strided view": Kind(lambda: _c()[::2, ::3], sent=True),
    "cupy views": Kind(_views, _use_views, sent=True),
    "cupy large": Kind(lambda: cupy.arange(5e7), lambda v: numbers(v[-3:]), sent=True),
    "cupy reversed view": Kind(lambda: _c()[::-1]),
    "cupy broadcast": Kind(lambda: cupy.broadcast_to(_c()[0], (3, 6))),
    "cupy complex": Kind(lambda: _c() * 1j),
    "cupy bool": Kind(lambda: _c() > 1),
    "cupy float16": Kind(lambda: _c().astype("float16")),
    "cupy no elements": Kind(lambda: _c()[:0], on_device=False),
    **{
        f"cupy sparse {kind}": Kind(partial(_sparse, kind), sent=kind == "csr")
        for kind in ("csr", "csc", "coo", "dia")
    },
    "cupy raw kernel beside an array": Kind(_kernel, _use_kernel),
    "cupy dict of many": Kind(lambda: {i: _c()[0, :1] + i for i in range(500)}),
    "cupy in an object": Kind(lambda: Holder(_c(), "host"), lambda v: numbers(v.by_name)),
    "numba array": Kind(_numba, sent=True),
    "numba strided view": Kind(lambda: _numba()[::2, ::3], sent=True),
    "numba Fortran order": Kind(lambda: _numba("F")),
    "jax nested": Kind(lambda: {"a": [_jax()]}),
    # The last: it leaves its default device current where it is unpacked.
    "jax array": Kind(_jax, sent=True),
}


# -- what runs in workers


def make(name: str) -> Any:
    return KINDS[name].make()


def use(name: str, value: Any) -> Any:
    """Return what the use of a value gives on the current device."""
    return KINDS[name].use(value)


def use_at_home(name: str, value: Any) -> Any:
    """Return what the use gives on the device where the value is."""
    with next(iter(nbytes_by_device(value)), Device(0)):
        return use(name, value)


def where(value: Any) -> list[int]:
    """Return the ordinals of the devices that a value is on."""
    return sorted(device.device_id for device in nbytes_by_device(value))
