"""The device that is current where a worker packs and unpacks values, and the size of messages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from dask.utils import parse_bytes
from distributed import Worker
from distributed.comm import connect
from distributed.utils_test import async_poll_for

from dask_devctx import Device, DevicePlugin, device_of
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.simulated_array import SimulatedArray
from tests.distributed.devices import current_context, here, on_cluster, with_plugin
from tests.python import python

packed: list[int | None] = []


class Seen:
    """Knows the device that was current where it was unpacked; notes those of packing."""

    unpacked_on: int | None = None

    def __init__(self, padding: bytes = b"") -> None:
        self.padding = padding

    def __reduce__(self) -> tuple[Callable[..., Seen], tuple[bytes]]:
        packed.append(here())
        return unpack, (self.padding,)


def unpack(padding: bytes) -> Seen:
    seen = Seen(padding)
    seen.unpacked_on = here()
    return seen


def unpacked_on(seen: Seen) -> int | None:
    return seen.unpacked_on


async def coroutine() -> set[int | None]:
    found = {here()}
    for _ in range(3):
        await asyncio.sleep(0.001)
        found.add(here())
    return found


async def fails_later() -> None:
    await asyncio.sleep(0)
    raise RuntimeError("later")


@with_plugin(4, devices=[2])
async def test_coroutines_that_are_for_no_device_see_none(client: Any, worker: Worker) -> None:
    for device in (None, "none"):
        with dask.annotate(device=device):
            assert await client.submit(coroutine, pure=False) == {None}
    assert await client.submit(coroutine, pure=False) == {2}
    assert await client.run(coroutine) == {worker.address: {2}}
    with dask.annotate(device=None):
        with pytest.raises(RuntimeError, match="later"):
            await client.submit(fails_later)
        cancelled = client.submit(asyncio.sleep, 60)
        await async_poll_for(lambda: worker.state.executing_count == 1, timeout=10)
        await cancelled.cancel()
        assert await client.submit(unpacked_on, Seen(), pure=False) == 2
    await client.unregister_worker_plugin("devctx")
    assert current_context() == 0
    assert await client.run(here) == {worker.address: None}


@pytest.mark.parametrize("nbytes", [0, 20_000_000], ids=["event loop", "offload"])
@with_plugin(4, devices=[2])
async def test_values_are_unpacked_on_the_workers_device(
    client: Any, worker: Worker, nbytes: int
) -> None:
    [seen] = await client.scatter([Seen(bytes(nbytes))])
    assert worker.data[seen.key].unpacked_on == 2
    with dask.annotate(device="none"):
        assert await client.submit(unpacked_on, seen) == 2
        assert await client.submit(unpacked_on, Seen(), pure=False) == 2  # in the task itself
    await client.scatter({"x": SimulatedArray.asarray(np.ones(3))}, hash=False)
    assert device_of(worker.data["x"]) is Device(2)
    packed.clear()
    assert (await client.gather(seen)).padding == bytes(nbytes)
    assert 2 in packed
    await client.unregister_worker_plugin("devctx")


def array(nbytes: int) -> SimulatedArray:
    return SimulatedArray(nbytes, "u1")


@with_plugin(4)
async def test_a_connection_that_broke_keeps_no_value(
    client: Any, worker: Worker, machine: SimulatedMachine
) -> None:
    with dask.annotate(device=0):
        x = client.submit(array, 1000)
    await x
    comm = await connect(worker.address)
    await comm.write({"op": "get_data", "keys": [x.key], "who": None, "reply": True})
    await comm.read()
    comm.abort()

    async def is_logged() -> bool:
        logs = await client.get_worker_logs()
        return any("failed during get data" in line for _, line in logs[worker.address])

    while not await is_logged():
        await asyncio.sleep(0.01)
    assert machine.gpus[0].used_memory == 1000
    x.release()
    await async_poll_for(lambda: not worker.state.tasks, timeout=10)
    gc.collect()
    await async_poll_for(lambda: machine.gpus[0].used_memory == 0, timeout=10)


@pytest.mark.parametrize(("configured", "ipc"), [("20MB", True), ("2GB", True), ("50MB", False)])
def test_other_workers_ask_for_as_much_as_dask_is_configured_to(configured: str, ipc: bool) -> None:
    name = "distributed.worker.transfer.message-bytes-limit"

    async def body(client: Any, scheduler: Any, worker: Any) -> None:
        await client.register_plugin(DevicePlugin(ipc=ipc))
        assert worker.state.transfer_message_bytes_limit == parse_bytes(configured)

    one_worker = on_cluster(1, config={name: configured})
    one_worker(body)()


# -- tensors, as distributed's own code and ours look at them


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
optim = SimpleNamespace(Optimizer=type("Optimizer", (), {}))
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
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{CHECK}"
    python("-c", program, first)
