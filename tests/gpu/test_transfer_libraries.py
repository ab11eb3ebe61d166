"""Each library's values on two real GPUs: right, on the right device, with their layout."""

from __future__ import annotations

import numpy as np
import pytest

from dask_devctx import Device
from dask_devctx.transfer import device_of, nbytes_by_device, to_device

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.usefixtures("two_gpus")]


_LAYOUTS = {
    "C": lambda x: x,
    "F": lambda x: x.T,
    "strided": lambda x: x[::2, 1:],
    "backwards": lambda x: x[::-1],
    "no elements": lambda x: x[:0],
    "one": lambda x: x[:1, :1],
    "no axes": lambda x: x[0, 0].reshape(()),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_cupy(layout):
    cupy = pytest.importorskip("cupy")
    host = np.arange(35, dtype="f8").reshape(5, 7)
    view = _LAYOUTS[layout]
    with Device(0):
        x = view(cupy.asarray(host))
    y = to_device(x, 1)
    assert device_of(y) is Device(1)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert y.flags.f_contiguous == x.flags.f_contiguous or layout in ("strided", "backwards")
    with Device(1):
        np.testing.assert_array_equal(cupy.asnumpy(y + 1), view(host) + 1)
    assert to_device(x, 0) is x


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "dia"])
def test_cupyx_sparse(kind):
    sparse = pytest.importorskip("cupyx.scipy.sparse")
    scipy_sparse = pytest.importorskip("scipy.sparse")
    host = np.diag(np.arange(1.0, 6.0)) + np.eye(5, k=1)
    import cupy

    with Device(0):
        x = getattr(sparse, f"{kind}_matrix")(getattr(scipy_sparse, f"{kind}_matrix")(host))
    y = to_device(x, 1)
    assert device_of(y) is Device(1)
    assert type(y) is type(x)
    with Device(1):
        np.testing.assert_array_equal(cupy.asnumpy((y.tocsr() @ y.tocsr()).toarray()), host @ host)


@pytest.mark.parametrize("layout", [name for name in _LAYOUTS if name != "backwards"])
def test_torch(layout):
    torch = pytest.importorskip("torch")
    host = torch.arange(35.0).reshape(5, 7)
    view = _LAYOUTS[layout]
    x = view(host.to("cuda:0"))
    y = to_device(x, 1)
    assert (device_of(y), y.device.index) == (Device(1), 1)
    assert torch.equal((y + 1).cpu(), view(host) + 1)
    assert y.stride() == x.stride() or layout in ("strided", "no elements")
    assert to_device(host, 1) is host


def test_torch_keeps_what_autograd_needs():
    torch = pytest.importorskip("torch")
    leaf = torch.ones(3, device="cuda:0", requires_grad=True)
    there = to_device(leaf, 1)
    assert there.is_leaf
    assert there.requires_grad
    to_device(leaf * 2, 1).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")  # torch's own
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_torch_tensor(layout):
    torch = pytest.importorskip("torch")
    dense = torch.eye(4, device="cuda:0")
    x = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    y = to_device(x, 1)
    assert device_of(x) is Device(0)
    assert device_of(y) is Device(1)
    indices, values = (2 * 4 * 8 if layout == "coo" else (5 + 4) * 8), 4 * 4
    assert nbytes_by_device(x) == {Device(0): indices + values}
    assert y.layout is x.layout
    assert torch.equal(y.to_dense().cpu(), dense.cpu())


def test_a_torch_module_and_its_optimizer_move_together():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to("cuda:0")
    model[0].tied = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = torch.ones(8, 4, device="cuda:0")
    model(batch).sum().backward()
    optimizer.step()
    before = {name: value.clone().cpu() for name, value in model.state_dict().items()}

    there, mover, data = to_device((model, optimizer, batch), 1)
    assert set(nbytes_by_device([there, mover])) == {Device(1)}
    assert mover.param_groups[0]["params"][0] is there[0].weight is there[0].tied
    there(data).sum().backward()
    mover.step()
    assert next(model.parameters()).device.index == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


@pytest.mark.filterwarnings("ignore:.*Grid size")  # Numba's own, about arrays as small as these
@pytest.mark.parametrize("layout", ["C", "F", "strided"])
def test_numba(layout):
    cuda = pytest.importorskip("numba.cuda")
    host = np.arange(35, dtype="f8").reshape(5, 7)
    view = _LAYOUTS[layout]
    # Transposed on the host: on the device Numba has to compile a kernel for it.
    source, turn = (np.asfortranarray(host), _LAYOUTS["C"]) if layout == "F" else (host, view)
    with cuda.gpus[0]:
        x = turn(cuda.to_device(source))
    y = to_device(x, 1)
    assert device_of(y) is Device(1)
    with cuda.gpus[1]:
        np.testing.assert_array_equal(y.copy_to_host(), turn(source))
