"""What a tensor on a device is sent as, whoever asked for torch's registrations first.

torch is a stub here, as much of it as distributed's own code and ours look at; ``tests/gpu`` has
the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

TORCH = """
import numpy
from types import SimpleNamespace
strided, uint8, bfloat16 = "strided", "uint8", "bfloat16"
def tensor(data, device="cpu", requires_grad=False):
    return Tensor(data, device, requires_grad)
def empty(n, dtype, layout):
    return Tensor(numpy.empty(n, dtype if dtype != "bfloat16" else "f4"), dtype=dtype)
from_numpy = tensor
class Tensor:
    grad, layout, is_quantized = None, strided, False
    def __init__(self, data, device="cpu", requires_grad=False, dtype=None):
        self.data, self.requires_grad = numpy.asarray(data), requires_grad
        self.dtype = dtype or self.data.dtype
        self.device = SimpleNamespace(type=device)
    is_cuda = property(lambda self: self.device.type == "cuda")
    def on(self, device, requires_grad=False):
        return type(self)(self.data, device, requires_grad, self.dtype)
    def cpu(self): return self.on("cpu")
    def detach(self): return self.on(self.device.type)
    def resolve_conj(self): return self
    def resolve_neg(self): return self
    def contiguous(self): return self
    shape = property(lambda self: self.data.shape)
    def view(self, what):
        same = what == -1 or isinstance(what, tuple)
        return self if same else Tensor(self.data, self.device.type, dtype=what)
    def requires_grad_(self, required=True):
        self.requires_grad = required
        return self
    def numpy(self):
        if self.is_cuda or self.dtype == "bfloat16":
            raise TypeError("not NumPy's")
        return self.data
class Parameter(Tensor): pass
class Module:
    def __init__(self, *tensors): self._parameters = dict(enumerate(tensors))
    def parameters(self): return self._parameters.values()
    def buffers(self): return ()
class Linear(Module): pass
nn = SimpleNamespace(Module=Module, Parameter=Parameter)
"""

CHECK = """
import sys
from distributed.protocol import dask_deserialize, dask_serialize, deserialize, serialize
from dask_devctx.worker.comms.serialization import register
first = sys.argv[1]
if first == "registered":
    register()
    assert "torch" not in sys.modules
import torch
if first == "unpacked":
    register()
    dask_deserialize.dispatch(torch.Tensor)
elif first == "sent":
    for kind in (torch.Tensor, torch.Linear):
        dask_serialize.dispatch(kind)
    register()
register()

def there_and_back(value, by):
    header, frames = serialize(value)
    assert header["serializer"] == by, (value, header, frames)
    return deserialize(header, frames)

for device in ("cpu", "cuda"):
    x = torch.tensor([1.0, 2.0], device, requires_grad=True)
    y = there_and_back(x, "dask")
    assert type(y) is torch.Tensor and y.device.type == device and y.requires_grad
    assert y.data.tolist() == [1, 2]
for device in ("cpu", "cuda"):
    y = there_and_back(torch.Tensor([1.0], device, dtype="bfloat16"), "dask")
    assert (y.dtype, y.device.type, y.data.tolist()) == ("bfloat16", device, [1.0])
there_and_back(torch.Linear(torch.tensor([1.0], "cpu")), "dask")
# as it arrives where nothing is registered
from distributed.protocol.torch import deserialize_torch_Tensor
header, frames = dask_serialize(torch.Tensor([1.0], "cuda", dtype="bfloat16"))
try:
    deserialize_torch_Tensor(header, frames)
except TypeError as error:
    assert "a tensor of torch.bfloat16 arrived as bytes" in str(error), error
else:
    raise AssertionError("it was taken for numbers")
tied = torch.Linear(x, x)
y = there_and_back(tied, "pickle")
assert y._parameters[0] is y._parameters[1]
unfinished = torch.Linear.__new__(torch.Linear)
there_and_back(unfinished, "dask")
"""


@pytest.mark.parametrize("first", ["registered", "unpacked", "sent"])
def test_tensors_on_devices_are_sent(first: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", CHECK, first],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
