"""An array on a simulated device: NumPy computes, and this module checks where.

It takes the place of CuPy's array on a machine without GPUs, and is as strict. Only its own device
computes with it, it does not mix with host arrays, and it only becomes a host array on request.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from operator import attrgetter
from typing import Any, Self

import numpy as np
from cuda.bindings import driver as types
from numpy.lib.mixins import NDArrayOperatorsMixin

from dask_devctx import driver, errors
from dask_devctx.cuda.device import Device
from dask_devctx.driver.backends import Backend
from dask_devctx.driver.relaxed import LEGACY_STREAM
from dask_devctx.errors import DevctxError
from dask_devctx.transfer.libraries import Library, known
from dask_devctx.transfer.location import Memory
from dask_devctx.transfer.traffic import timed

_Array = np.ndarray[Any, Any]

_METHODS = (
    "all any argmax argmin argsort astype choose clip conj copy cumprod cumsum diagonal dot "
    "flatten max mean min nonzero prod ravel repeat reshape round searchsorted squeeze std "
    "sum swapaxes take trace transpose var view "
)

# The remedy where a function of dask.array, such as da.unique or da.percentile, needs host arrays.
_DASK_ARRAYS = (
    ". A function of dask.array that works on host arrays alone takes "
    "x.map_blocks(lambda block: block.get())"
)

# Functions whose indices may be in host memory, as in x[indices].
_TAKE_HOST_INDICES = frozenset([np.take, np.compress, np.repeat])


class SimulatedArray(NDArrayOperatorsMixin):
    """A NumPy-backed array of zeros on the simulated device that is current when it is made.

    Parameters
    ----------
    shape
        Its shape.
    dtype
        The type of its elements.
    order
        ``"C"`` or ``"F"``.

    Raises
    ------
    DeviceMemoryError
        The device does not have enough memory left.
    DriverUnavailableError
        The devices are real.

    Notes
    -----
    If no device is current, the array is on the first device, as with CuPy. NumPy's functions and
    methods work on it through NumPy's protocols and give arrays on the same device. Python's and
    NumPy's scalars mix with it; host arrays do not. An array without elements may be used on any
    device, since it needs no computation.

    Its bytes come from the simulated device's memory, and go back with the last array that views
    them. They belong to the context that is current when the array is made, and are freed with
    that context. Computing on them in another context is an illegal address; after that, nothing on
    the devices works in this process. A pickle holds the values; the array arrives on the device
    that is current at unpickling.

    Examples
    --------
    >>> with Device(1):
    ...     x = SimulatedArray.asarray([[1.0, 2.0], [3.0, 4.0]])
    ...     y = (x + x.T).sum()
    >>> y.device.device_id, y.get()
    (1, array(20.))
    >>> x + 1
    Traceback (most recent call last):
      ...
    dask_devctx.errors.DevctxError: an array of shape (2, 2) lives on cuda:1 and cannot be
    used on cuda:0. ...
    """

    __slots__ = ("__weakref__", "_data", "_device", "_memory")
    # NumPy's own arrays leave operators to this class, and dask prefers its functions to NumPy's.
    __array_priority__ = 100

    _data: _Array
    _device: Device
    _memory: _Memory | None

    def __new__(cls, shape: int | tuple[int, ...], dtype: Any = float, order: Any = "C") -> Self:
        size = math.prod(shape) if isinstance(shape, (tuple, list)) else int(shape)
        nbytes = np.dtype(dtype).itemsize * size
        return cls._filled(_here(), nbytes, lambda: np.zeros(shape, dtype, order))

    @classmethod
    def asarray(cls, values: Any, dtype: Any = None, order: Any = None) -> Self:
        """Return ``values`` as an array on the current device, copied from the host.

        An array that is on the current device already is returned unchanged.

        Parameters
        ----------
        values
            Anything that NumPy can make an array of.
        dtype
            The type of its elements; the type of ``values`` by default.
        order
            ``"C"`` or ``"F"``; the order of ``values`` by default.
        """
        if isinstance(values, cls):
            return _apply(np.asarray, (values, dtype, order), {})  # type: ignore[no-any-return]
        host = np.asarray(values, dtype)
        return cls._filled(_here(), host.nbytes, lambda: np.array(host, order=order))

    def _view(self, offset: int, shape: tuple[int, ...], dtype: Any, strides: Any) -> Self:
        """Return an array around this array's own memory; ``offset`` and strides are in bytes."""
        flat = self._data.view("u1").reshape(-1)
        view = np.ndarray(shape, dtype, flat, offset, strides)
        return self._around(view, self._device, self._memory)

    @classmethod
    def _filled(cls, device: Device, nbytes: int, make: Callable[[], _Array]) -> Self:
        """Take the device's memory first, and then the host memory that represents it."""
        memory = _Memory(device, nbytes) if nbytes > 0 else None
        data = make()
        if memory is not None:
            memory.lend(data)
        return cls._around(data, device, memory)

    @classmethod
    def _around(cls, data: _Array, device: Device, memory: _Memory | None) -> Self:
        array = object.__new__(cls)
        array._data, array._device, array._memory = data, device, memory
        _register_with_dask_array()
        return array

    # -- its properties

    @property
    def device(self) -> Device:
        """The device of the array."""
        return self._device

    # NumPy's, as below. `flags.writeable` is False for a shared copy of a task's input.
    shape: Any
    dtype: Any
    ndim: int
    size: int
    itemsize: int
    nbytes: int
    strides: Any
    flags: Any
    T: Any
    real: Any
    imag: Any

    @property
    def _pointer(self) -> int:
        """The address of its first element on the device, for the driver's copies."""
        if self.dtype.hasobject:
            raise TypeError(f"{self!r} holds Python's objects, which the driver cannot copy")
        return 0 if self._memory is None else self._memory.pointer(self._data)

    # -- explicit copies to the host and to other devices

    def get(self) -> _Array:
        """Return a copy in host memory; any device may be current."""
        return self._readable().copy(order="K")

    def copy_to(self, device: Device) -> Self:
        """Return a copy on another device, with the same layout; any device may be current."""
        data = self._readable()
        with device, timed(device, self._device, data.nbytes, LEGACY_STREAM):
            return self._filled(device, data.nbytes, lambda: data.copy(order="K"))

    def _readable(self) -> _Array:
        """Return the values for a copy, which the driver can make in any context."""
        if self._memory is not None and not self._memory.block.alive:
            with self._device:  # the driver's error says why the memory cannot be read
                base = self._memory.block.base
                self._device._backend.calls.work.copy(base, base, 1, LEGACY_STREAM)
        return self._data

    item: Any  # one element as a Python number, and all of them in lists; any device may be current
    tolist: Any

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(
            "a SimulatedArray is not turned into a NumPy array unasked: it lives on "
            f"{self._device}. Copy it to the host with .get(){_DASK_ARRAYS}"
        )

    # -- computation

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _apply(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _apply(function, args, kwargs, host=function in _TAKE_HOST_INDICES)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return _apply(lambda data, where: data[where], (self, index), {}, host=True)

    def __setitem__(self, index: Any, value: Any) -> None:
        _check(self)[_unwrapped(index, [], host=True)] = _unwrapped(value, [])

    # -- text, size and pickle

    def __repr__(self) -> str:
        value = "" if self.ndim else f" {self._data}"  # NumPy's, whatever state the device is in
        return f"<SimulatedArray{value} {self.dtype}{list(self.shape)} on {self._device}>"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.ndim else format(repr(self), spec)

    def __sizeof__(self) -> int:
        # dask asks this of an unknown type. The answer has the device's bytes, as CuPy's does.
        return object.__sizeof__(self) + self.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).asarray, (self._readable(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy_to(self._device)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        from dask.base import normalize_token

        return "dask_devctx.SimulatedArray", self._device.uuid, normalize_token(self._readable())


class _Memory:
    """Bytes of a simulated device, taken until the last array that views them is gone."""

    __slots__ = ("__weakref__", "_backend", "_owner", "block")

    def __init__(self, device: Device, nbytes: int) -> None:
        self._backend = backend = device._backend
        if not backend.simulated:
            raise errors.DriverUnavailableError(
                "SimulatedArray lives on simulated devices and this process has real ones",
                f"Use CuPy's array, or set {driver.SIMULATED_DEVICES_VARIABLE}",
            )
        # The current context may be one that the user made.
        with nullcontext() if Device.current() is device else device:
            pointer = backend.calls.work.allocate(nbytes, as_a_user=True)
        self.block = backend.machine.driver.block(pointer)
        weakref.finalize(self, _free, backend, pointer).atexit = False

    def lend(self, data: _Array) -> None:
        """Use NumPy's memory as the contents of the device's memory."""
        self._owner = _owner(data)
        self.block.lend(self._owner)

    def pointer(self, data: _Array) -> int:
        return int(self.block.base + _address(data) - _address(self._owner))

    def is_current(self) -> bool:
        """Return whether a computation on this thread may use the memory now."""
        handle = self._backend.current_context()
        return bool(self.block.alive and handle == self.block.context.handle)


def _free(backend: Backend, pointer: int) -> None:
    # In a poisoned or forked process the memory goes with the process; no caller can handle this.
    with suppress(DevctxError):
        backend.calls.work.free(pointer)


def _address(data: _Array) -> int:
    return int(data.__array_interface__["data"][0])


def _here() -> Device:
    return Device.current() or Device(0)


def _check(array: SimulatedArray) -> _Array:
    """Return the values for a computation now, after checking that it is allowed here."""
    memory = array._memory
    if memory is not None and not memory.is_current() and array._data.size:
        if array._device is not (here := _here()):
            raise DevctxError(
                f"an array of shape {array.shape} lives on {array._device} and cannot be used on "
                f"{here}. Copy it there: to_device(value, '{here}'), or use it on its own device"
            )
        block, backend = memory.block, here._backend
        if Device.current() or not (block.alive and block.context.is_primary):
            # As after a kernel that uses an address that its context does not have.
            backend.machine.faults.poison(types.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
            backend.calls.synchronize()
    return array._data


def _apply(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, host: bool = False
) -> Any:
    """Return the result of NumPy's function on the values, as an array on the device."""
    used: list[SimulatedArray] = []
    args = _unwrapped(tuple(args), used, host=host)
    kwargs = _unwrapped(kwargs, used, host=host)
    return _wrapped(function(*args, **kwargs), used)


def _unwrapped(value: Any, used: list[SimulatedArray], *, host: bool = False) -> Any:
    if isinstance(value, SimulatedArray):
        used.append(value)
        return _check(value)
    if type(value) in (list, tuple):
        return type(value)(_unwrapped(item, used, host=host) for item in value)
    if type(value) is dict:
        return {key: _unwrapped(item, used, host=host) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.ndim and not host:
        raise TypeError(
            f"a NumPy array of shape {value.shape} is in host memory and cannot be computed with "
            f"a SimulatedArray. Put it on the device with SimulatedArray.asarray{_DASK_ARRAYS}"
        )
    return value


def _wrapped(result: Any, used: list[SimulatedArray]) -> Any:
    if type(result) in (list, tuple):
        return type(result)(_wrapped(item, used) for item in result)
    if isinstance(result, np.generic):
        result = np.asarray(result)
    if not isinstance(result, np.ndarray):
        return result
    owner = _owner(result)
    for array in used:
        if result is array._data:  # NumPy returned one of its arguments, such as out=
            return array
    for array in used:
        if owner is _owner(array._data):
            return SimulatedArray._around(result, array._device, array._memory)
    return SimulatedArray._filled(_here(), owner.nbytes, lambda: result)


def _owner(data: _Array) -> _Array:
    while isinstance(data.base, np.ndarray):
        data = data.base
    return data


def _computed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: SimulatedArray, *args: Any, **kwargs: Any) -> Any:
        return _apply(function, (self, *args), kwargs)

    method.__name__, method.__doc__ = name, f"Like ``numpy.ndarray.{name}``, on the device."
    return method


def _on_host(read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: read(self._readable(), *args)


for _name in _METHODS.split():
    setattr(SimulatedArray, _name, _computed(_name, getattr(np.ndarray, _name)))
for _name in ["shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides", "flags"]:
    setattr(SimulatedArray, _name, property(attrgetter(f"_data.{_name}")))
for _name in ["T", "real", "imag"]:
    setattr(SimulatedArray, _name, property(_computed(_name, attrgetter(_name))))
for _name in ["item", "tolist", "__index__", "__bool__"]:
    setattr(SimulatedArray, _name, _on_host(getattr(np.ndarray, _name)))
for _kind in (float, int, complex):
    _read = _on_host(lambda data, kind=_kind: kind(data.item()))
    setattr(SimulatedArray, f"__{_kind.__name__}__", _read)

_registered = False


def _register_with_dask_array() -> None:
    """Tell dask.array, if it is imported, that counting elements gives arrays on the device."""
    global _registered
    if not _registered and "dask.array" in sys.modules:
        from dask_devctx.dask_internals.graphs import count_elements_on_device

        _registered = count_elements_on_device(SimulatedArray)


def _memory_of(array: SimulatedArray) -> Memory | None:
    if (memory := array._memory) is None:
        return None
    return Memory(array._device, int(memory.block.base), int(memory.block.nbytes))


def _empty(shape: tuple[int, ...], dtype: Any, device: Device) -> SimulatedArray:
    kind = np.dtype("u1" if dtype is None else dtype)
    nbytes = kind.itemsize * math.prod(shape)
    return SimulatedArray._filled(device, nbytes, lambda: np.empty(shape, kind))


LIBRARY = Library(
    SimulatedArray,
    attrgetter("_pointer"),
    _empty,
    lambda array: array if array.flags.c_contiguous else array.copy("C"),
)
known(
    SimulatedArray,
    nbytes=lambda array: {array._device: array._data.nbytes},
    move=SimulatedArray.copy_to,
    host=SimulatedArray.get,
    memory=_memory_of,
)
