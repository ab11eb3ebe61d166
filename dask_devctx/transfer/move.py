"""``to_device``: move a value to another device, in order, and keep its source alive meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from dask_devctx import driver
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.naming import refuse_no_name
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.driver.relaxed import RelaxedCapture
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import walk
from dask_devctx.transfer.events import Stamp, hold, release_held
from dask_devctx.transfer.location import nbytes_by_device
from dask_devctx.transfer.rebuild import Memo, Rebuild
from dask_devctx.transfer.traffic import TimedCopy, connect, thread
from dask_devctx.transfer.walk import Registry

T = TypeVar("T")
After = Stamp | Iterable[Stamp] | None

# -- the host as a destination: ``to_device(value, "cpu")``


to_host = Registry("to_host", lambda value: None)
to_host.__doc__ = """Copies of values in host memory: register a function for a type of your own.

``to_host.register(T)`` decorates a function that takes a value of the type ``T`` and returns a
complete copy in host memory. At the call the value's device is current, and its current streams
wait for the work that makes the value. ``to_device(value, "cpu")`` calls it.
"""


_NO_COPY = (
    "a {0} lives on {1}, and nothing is known that copies one to the host. For a type of your own, "
    "register a function that takes one and returns the copy, beside its function for to_device: "
    "from dask_devctx.transfer import to_host; to_host.register({0}). For a library's array, call "
    "the library's own: CuPy's .get(), torch's .cpu(), Numba's .copy_to_host(), jax.device_get"
)
# The number of holds that each move checks: more than it makes, so that none stays for long.
_LOOK_AT_MOST = 8


class Move:
    """One call of ``to_device`` and all those inside it; with the device None, one to the host."""

    # A copy to the host is complete when its function returns: nothing is held.

    def __init__(
        self,
        device: Device | None,
        after: After = None,
        *,
        copy: bool = False,
        guard_source: bool = True,  # whoever writes to the source next waits for the copy
        counted: bool = False,  # dask keeps the copies: they are timed, and read-only if possible
    ) -> None:
        self.device = device
        self._after = () if after is None else (after,) if isinstance(after, Stamp) else [*after]
        self._copy = copy
        self._guard_source = guard_source
        self.counted = counted
        self.timed: list[TimedCopy] = []
        self._sources: dict[Device, list[Stamp]] = {}
        self._read: list[Any] = []
        self._waited_here = False
        self._memo: Memo = {}

    def run(self, value: Any) -> Any:
        """Return the value on the device."""
        release_held(_LOOK_AT_MOST)
        before, thread.move = thread.move, self
        try:
            with RelaxedCapture(driver.backend().driver().work):  # libraries allocate
                return self.take(value)
        finally:
            thread.move = before
            self._finish()

    def take(self, value: Any) -> Any:
        """Return a value on the device, as a part of this move."""
        if walk.is_plain(value):
            return value
        if walk.find(type(value)) is walk.LEAF:
            return self.leaf(value)
        rebuild = Rebuild(self.leaf, self._memo)
        try:
            # Values that are copied like a pickle run their own code.
            with nullcontext() if self.device is None else self.device:
                return rebuild.run(value)
        except Exception as error:
            if rebuild.at is None or isinstance(error, DevctxError) or is_out_of_memory(error):
                raise  # a leaf or the device caused it, and not the type
            raise DevctxError(
                f"a {rebuild.at.__qualname__} with arrays cannot be taken to {self.device or 'cpu'}"
                f": {error}. Register it with device_of and to_device, or run the task where it is"
            ) from error

    # -- the parts

    def leaf(self, value: Any) -> Any:
        """Return an array, or a value of a registered type, on the device."""
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        moved = value
        places = nbytes_by_device(value)
        if places and (self._copy or places.keys() != {self.device}):
            kind = type(value)
            function: Any = to_device.find(kind) or _stay
            if self.device is None and (function := to_host.find(kind)) is None:
                raise TypeError(_NO_COPY.format(kind.__qualname__, next(iter(places))))
            for source in places:
                self.order(source)
            if self.device is None:
                with next(iter(places)):
                    moved = function(value)
            else:
                self.keep(value)
                with self.device:
                    moved = function(value, self.device)
            if self.counted and moved is not value:
                with suppress(AttributeError):  # most libraries have no read-only arrays
                    moved.flags.writeable = False
        elif places and self.device is not None and not self._waited_here:
            self._waited_here = True
            for stamp in self._after:
                if self.device in stamp.devices:
                    stamp.hold_back(self.device)
        return self._memo.setdefault(id(value), (value, moved))[1]

    def order(self, source: Device, *, on_source: bool = False) -> None:
        """Make this thread's streams wait for the work that makes the value's part on ``source``.

        With ``on_source``, the source's streams wait, too: some libraries work there first.
        """
        target = source if self.device is None else self.device
        if source not in self._sources:
            if source is not target:
                connect(target, source)
            # A task of several devices may have made the part on one of them by work on another, so
            # the copy waits for whole stamps; without one, for all that the source was given.
            stamps = [stamp for stamp in self._after if source in stamp.devices]
            self._sources[source] = stamps or [Stamp.of_devices([source])]
            for stamp in self._sources[source]:
                stamp.hold_back(target)
        if on_source:
            for stamp in self._sources[source]:
                stamp.hold_back(source)

    def keep(self, value: Any) -> None:
        """Keep a value alive until the copy that reads it is done."""
        self._read.append(value)

    def _finish(self) -> None:
        if self._read and self.device is not None:
            done = Stamp.of_devices([self.device], blocking=False)
            for source in self._sources if self._guard_source else ():
                if source is not self.device:
                    done.hold_back(source)
            hold(done, *self._read)


def _stay(value: T, device: Device) -> T:
    return value


class ToDevice(Registry):
    """Return a value on a device: a copy if it lives on another device, otherwise itself.

    Parameters
    ----------
    value
        Anything. Data in host memory stays there. The search includes the contents of
        containers and of objects of Python classes. A container in which nothing moves is
        returned itself; any other is copied, and keeps the contents that do not move. An object
        that is referenced twice is copied once. The value itself is never changed.
    device
        Anything that :class:`~dask_devctx.Device` accepts, or ``"cpu"`` for the host. There a
        CuPy array becomes a NumPy array, and a torch tensor becomes a tensor on the CPU.
    after
        Stamps of the work that makes the value, by ``dask_devctx.transfer.stamp``. Without one, the
        copy waits for all work that the value's device has been given so far.
    copy
        Also copy arrays that are on the device already: the caller is going to write to them.
        ``to_device(x, Device.current(), copy=True)`` is a task's own copy of an input.

    Returns
    -------
    object
        The value, for use on this thread's current streams of the device. Another thread first
        makes its streams wait for a stamp of it.

    Raises
    ------
    DeviceNotFoundError
        There is no such device.
    DevctxError
        The value holds an array that has to move, and the value cannot be copied around it.
    DriverError
        The driver refuses.
    MemoryError
        The device does not have enough memory left. Each library raises its own class: torch's
        is a ``RuntimeError``.

    Notes
    -----
    This does not wait for any device, except that a copy to the host is complete on return. The
    copy comes after the work that makes the value, and before any later work in this thread's
    current streams, also those of the source: it may be written to at once. The source is kept
    alive until the copy has read it. The current device stays current.

    Two functions make a type known: one for ``device_of``, and one for ``to_device``. The
    function of ``to_device.register(T)`` is called for a value on another device. At the call,
    ``device`` is current, the streams wait, and everything in the value is kept alive. The
    function may call ``to_device`` for the value's parts. A third function, of
    ``to_host.register(T)``, copies a value to the host.

    Examples
    --------
    >>> from dask_devctx.simulated_array import SimulatedArray
    >>> from dask_devctx.transfer import device_of, to_device
    >>> class Grid:
    ...     def __init__(self, cells):
    ...         self.cells = cells
    >>> @device_of.register(Grid)
    ... def _(grid):
    ...     return device_of(grid.cells)
    >>> @to_device.register(Grid)
    ... def _(grid, device):
    ...     return Grid(to_device(grid.cells, device))

    >>> grid = Grid(SimulatedArray((2, 2)))
    >>> there = to_device(["a grid", grid], 1)[1]
    >>> device_of(there) is Device(1), device_of(grid) is Device(0)
    (True, True)
    >>> to_device(there, 1) is there
    True
    >>> to_device(grid.cells, "cpu")
    array([[0., 0.],
           [0., 0.]])
    """

    def __init__(self) -> None:
        super().__init__("to_device", _stay)

    def __call__(
        self,
        value: T,
        device: object,
        *,
        after: After = None,
        copy: bool = False,
    ) -> T:
        kind = getattr(device, "type", device)  # torch's device has one
        on_host = isinstance(kind, str) and kind == "cpu"
        if walk.is_plain(value):
            if device is not None and not on_host:
                refuse_no_name(device)  # the arguments may be swapped
            return value
        target = None if on_host else Device(device)
        if (move := thread.move) is not None and move.device is target:
            return move.take(value)  # type: ignore[no-any-return]
        some = [value] if target is not None else walk.leaves(value)  # to the host, of any number
        if not any(map(nbytes_by_device, some)):
            return value
        move = Move(target, after, copy=copy)
        return move.run(value)  # type: ignore[no-any-return]


to_device = ToDevice()
