"""A GPU, and the scope that makes it current."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, final

from dask_devctx import driver
from dask_devctx.cuda import discovery, naming
from dask_devctx.cuda.context import PrimaryContext
from dask_devctx.cuda.naming import DeviceInfo
from dask_devctx.cuda.suspending import RunningScope
from dask_devctx.driver.backends import Backend, ProcessLock


class ComputeCapability(NamedTuple):
    """The architecture's number."""

    major: int
    minor: int


class MemoryInfo(NamedTuple):
    """A device's memory, in bytes."""

    free: int
    total: int


@final
class Device(RunningScope):
    """A GPU. ``with device:`` makes it current on this thread, then restores the previous context.

    Parameters
    ----------
    which
        Its ordinal (``1``, ``"1"`` or ``"cuda:1"``), its UUID or a unique prefix of one
        (``"GPU-…"``, ``"MIG-…"``, or a whole UUID without ``GPU-``), its PCI bus id, another
        ``Device``, or a device object of torch, CuPy, Numba, JAX or cuda.core. None, ``"cuda"``
        and torch's device without an index mean the current device, or the first device if none is
        current. (The annotation ``device=None`` is another matter: a task without a device.)

    Raises
    ------
    DeviceNotFoundError
        There is no such device, or several devices have the prefix.
    TypeError
        ``which`` does not name a device: a bool or a float, for example.
    DriverUnavailableError
        No GPU can be found on this machine, and none is simulated.

    Notes
    -----
    There is one object per GPU and process. It is immutable, hashable, and usable from any thread
    and any number of times at once. It is pickled by its UUID, so it names the same GPU in a
    process with another ``CUDA_VISIBLE_DEVICES``. A process that does not have that GPU can hold
    the object; using it there raises ``DeviceNotFoundError``.

    Making the object calls no driver and creates no context. The first scope retains the device's
    primary context, once per process. In a process that was forked after CUDA was initialised,
    scopes raise ``DriverUnavailableError``.

    References
    ----------
    ``cuDevicePrimaryCtxRetain``, ``cuCtxGetCurrent``, ``cuCtxSetCurrent``.

    Examples
    --------
    >>> with Device(1) as device:
    ...     Device.current() is device
    True
    >>> Device.current() is None
    True
    """

    __slots__ = ("_info", "_primary", "_uuid")

    _uuid: str
    _info: DeviceInfo | None
    _primary: PrimaryContext

    def __new__(cls, which: object = None) -> Self:
        if type(which) is int:  # the most common case: every `with Device(1):`
            known: Self | None = driver.backend().ordinals.get(which)
            if known is not None:
                return known
        elif isinstance(which, cls):
            return which
        backend = driver.backend()
        settled = backend.initialised
        inventory = discovery.inventory(backend)
        info = None if which is None else naming.find(which, inventory)
        if info is None:
            current = cls.current()
            if current is not None:
                return current
            info = naming.find(0, inventory)
            assert info is not None
        device = cls._interned(backend, info.uuid)
        if type(which) is int and settled:
            backend.ordinals[which] = device
        return device

    def __init_subclass__(cls) -> None:
        # There is one object per GPU: its class would depend on the first caller.
        raise TypeError("Device cannot be subclassed: hold one, or wrap it")

    @classmethod
    def _interned(cls, backend: Backend, uuid: str) -> Self:
        with _lock:
            found: Self | None = backend.devices.get(uuid)
            if found is None:
                device = object.__new__(cls)
                device._backend = backend
                device._handle = 0
                device._uuid = uuid
                device._info = None
                device._primary = PrimaryContext(device)
                backend.devices[uuid] = found = device
        return found

    @classmethod
    def current(cls) -> Self | None:
        """Return the device whose context is current on this thread, or None.

        Raises
        ------
        DriverError
            The driver does not answer.
        VisibleDevicesError
            ``CUDA_VISIBLE_DEVICES`` was changed and hides the current device now.

        Notes
        -----
        Initialises nothing. No device is current before something in this process has used CUDA,
        and none is ever current on a machine without a driver. The context is asked for
        (``cuCtxGetCurrent``) before its device.
        """
        backend = driver.backend()
        return cls._of_current_context(backend) if backend.current_context() else None

    @classmethod
    def _of_current_context(cls, backend: Backend) -> Self:
        # Joined by UUID: another library may have initialised CUDA under another environment.
        ordinal = backend.driver().current_device()
        uuid = discovery.by_driver_ordinal(backend, ordinal).uuid
        return backend.devices.get(uuid) or cls._interned(backend, uuid)

    def __reduce__(self) -> tuple[Callable[[str], Device], tuple[str]]:
        return _from_uuid, (self._uuid,)

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "dask_devctx.Device", self._uuid

    def __repr__(self) -> str:
        # A device that was unpickled here may have no known ordinal, or none at all: a repr looks
        # nothing up.
        ordinal = discovery.ordinal_if_known(self._backend, self._uuid)
        return f"<Device cuda:{'?' if ordinal is None else ordinal} ({self._uuid})>"

    def __str__(self) -> str:
        return f"cuda:{self.device_id}"

    def __index__(self) -> int:
        """The ordinal, for functions of other libraries that take a device's number."""
        return self.device_id

    # -- its properties

    @property
    def info(self) -> DeviceInfo:
        """All known facts about the device, found without a context."""
        if self._info is not None:
            return self._info
        info = naming.find(self._uuid, discovery.inventory(self._backend))
        assert info is not None
        if self._backend.initialised:  # before that, the environment may still change the ordinals
            self._info = info
        return info

    @property
    def device_id(self) -> int:
        """The device's CUDA ordinal in this process, after ``CUDA_VISIBLE_DEVICES``.

        Raises
        ------
        DeviceNotFoundError
            This process does not have the device. Every property but ``uuid`` raises this.
        """
        return self.info.device_id

    @property
    def uuid(self) -> str:
        """``"GPU-…"``, or ``"MIG-…"`` for a MIG instance."""
        return self._uuid

    @property
    def name(self) -> str | None:
        """The product's name; None if neither NVML nor the driver says it."""
        return self.info.name

    @property
    def pci_bus_id(self) -> str | None:
        """Domain, bus, device and function: ``"0000:00:06.0"``."""
        return self.info.pci_bus_id

    @property
    def compute_capability(self) -> ComputeCapability:
        """Major and minor number of the architecture."""
        found = self.info.compute_capability
        if found is None:  # NVML does not say it; the driver knows it without a context
            found = self._backend.driver().device_compute_capability(self._ordinal())
        return ComputeCapability(*found)

    @property
    def arch(self) -> str:
        """The compute capability as compilers write it: ``"90"`` for 9.0."""
        return "{}{}".format(*self.compute_capability)

    @property
    def memory_info(self) -> MemoryInfo:
        """Free and total bytes of the device now; any process may hold the rest.

        Without NVML the driver says it, which needs the primary context.

        Raises
        ------
        DriverError
            Neither NVML nor the driver answers.
        """
        found = discovery.memory_info(self._backend, self.info)
        if found is None:
            with self:
                found = self._backend.calls.work.memory_info()
        return MemoryInfo(*found)

    @property
    def primary_context(self) -> PrimaryContext:
        """The context that all libraries of this process share; reading this does not create it."""
        return self._primary

    context = primary_context

    def can_access_peer(self, peer: object) -> bool:
        """Return whether kernels here can reach another device's memory: ``cuDeviceCanAccessPeer``.

        Parameters
        ----------
        peer
            Anything that :class:`Device` accepts. A device is not a peer of itself.
        """
        return self._backend.driver().can_access_peer(self._ordinal(), Device(peer)._ordinal())

    # -- its actions

    def _ordinal(self) -> int:
        return discovery.driver_ordinal(self._backend, self.info)

    def _bind(self) -> int:
        with _lock:
            if not self._handle:
                handle = self._backend.driver().primary_retain(self._ordinal())
                self._backend.lasting.add(handle)
                self._handle = handle
            return self._handle

    def set_current(self) -> None:
        """Make it current on this thread until something else changes that: ``cuCtxSetCurrent``.

        Raises
        ------
        DriverError
            The driver refuses.

        Notes
        -----
        When a scope that is open on the thread is left, it restores the context from before it.
        """
        handle = self._handle or self._bind()
        self._backend.calls.set_current(handle)

    def synchronize(self) -> None:
        """Wait until all work of the device's primary context is done: ``cuCtxSynchronize``.

        Raises
        ------
        DriverError
            Work failed: any earlier call may have caused the error.

        Notes
        -----
        An unused device has nothing to wait for; this does not create a context on it.
        """
        if self._handle or self._backend.driver().primary_state(self._ordinal())[1]:
            with self:
                self._backend.calls.synchronize()

    sync = synchronize


_lock = ProcessLock()


def _from_uuid(uuid: str) -> Device:
    return Device._interned(driver.backend(), uuid)


def devices() -> tuple[Device, ...]:
    """Return the GPUs that this process may use, in CUDA's order: the position is the ordinal.

    Raises
    ------
    DriverUnavailableError
        No GPU can be found on this machine, and none is simulated.

    Notes
    -----
    Follows ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``. Creates no context.

    Examples
    --------
    >>> len(devices())
    4
    """
    backend = driver.backend()
    found = discovery.inventory(backend).devices
    return tuple(Device._interned(backend, info.uuid) for info in found)


def named_devices(wanted: Sequence[object] | None) -> tuple[Device, ...]:
    """Return the named devices, each once; None means all devices that this process sees."""
    found = devices() if wanted is None else tuple(map(Device, wanted))
    if len({*found}) < len(found):
        raise ValueError(f"devices names each device once, got {wanted!r}")
    return found
