"""``to_device``: take a value to another device, in order and with its source kept alive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory
from dask_devctx.errors import DevctxError, ValueNotMovableError
from dask_devctx.transfer import walk
from dask_devctx.transfer.events import Stamp, hold, release_held
from dask_devctx.transfer.host import Host, cannot_be_copied, is_host, to_host
from dask_devctx.transfer.location import device_of, nbytes_by_device
from dask_devctx.transfer.peers import connect
from dask_devctx.transfer.rebuild import Memo, Rebuild, UnmovableError
from dask_devctx.transfer.registry import Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")
After = Stamp | Iterable[Stamp] | None

# How many holds each move looks at: more than it makes, so that none stay for long.
_LOOK_AT_MOST = 8


def _stay(value: T, device: Device) -> T:
    return value


_told: set[type] = set()


def _stay_unmoved(value: T, device: Device) -> T:
    kind = type(value)
    if kind not in _told:
        _told.add(kind)
        logger.warning(
            "a %s lives on another device and stays there: device_of knows the type, and to_device "
            "does not. Register a function that takes one to a device: to_device.register(%s)",
            kind.__qualname__,
            kind.__qualname__,
        )
    return value


class Move:
    """One call of ``to_device`` and all those inside it.

    Parameters
    ----------
    device
        Where to.
    after
        Stamps of the work that makes the value.
    copy
        Whether what is there already is copied too.
    guard_source
        Whether the source's streams wait for the copies.
    read_only
        Whether copies are made read-only, where their library can.
    """

    def __init__(
        self,
        device: Device,
        after: After = None,
        *,
        copy: bool = False,
        guard_source: bool = True,
        read_only: bool = False,
    ) -> None:
        self.device = device
        self.copy = copy
        self._after = (
            () if after is None else (after,) if isinstance(after, Stamp) else tuple(after)
        )
        self._guard_source = guard_source
        self._read_only = read_only
        self._sources: dict[Device, list[Stamp]] = {}
        self._read: list[Any] = []
        self._waited_here = False
        self._memo: Memo = {}

    def run(self, value: Any) -> Any:
        """Return the value as it is on the device."""
        release_held(_LOOK_AT_MOST)
        before, _thread.move = _thread.move, self
        try:
            return self.take(value)
        finally:
            _thread.move = before
            self._finish()

    def take(self, value: Any) -> Any:
        """Return a value as it is on the device, as a part of this move."""
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        found = walk.find(type(value))
        if found is None:
            return value
        if found is walk.LEAF:
            return self.leaf(value)
        try:
            with self.device:  # the reduced are made by their own code
                return Rebuild(self.leaf, self._memo).run(value)
        except UnmovableError as error:
            why = error.__cause__
            if isinstance(why, DevctxError) or (why is not None and is_out_of_memory(why)):
                raise why from None  # the device's, and not the type's
            kind, reason = error.kind.__qualname__, str(error.reason)
            raise ValueNotMovableError(kind, str(self.device), reason) from error.__cause__

    # -- the parts

    def leaf(self, value: Any) -> Any:
        """Take there what is an array, or a type of somebody's."""
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        moved = value
        places = nbytes_by_device(value)
        elsewhere = [source for source in places if source is not self.device]
        if elsewhere or (places and self.copy):
            for source in places:
                self.order(source)
            self._read.append(value)
            with self.device:
                moved = to_device.function_of(type(value))(value, self.device)
            if self._read_only and moved is not value:
                with suppress(AttributeError):  # most libraries cannot say it
                    moved.flags.writeable = False
        elif places:
            self._wait_here()
        return self._memo.setdefault(id(value), (value, moved))[1]

    def order(self, source: Device, *, on_source: bool = False) -> None:
        """Let this thread's streams wait for the work that makes what is on ``source``.

        Parameters
        ----------
        on_source
            The source's streams too, for a library that works there before it copies.
        """
        if source not in self._sources:
            if source is not self.device:
                connect(self.device, source)
            self._sources[source] = self.work_of(source)
            for stamp in self._sources[source]:
                stamp.hold_back(self.device, of=source)
        if on_source:
            for stamp in self._sources[source]:
                stamp.hold_back(source, of=source)

    def work_of(self, source: Device) -> list[Stamp]:
        """Return what the copy waits for on a source."""
        stamped = [stamp for stamp in self._after if source in stamp.devices]
        # Never stamped: whatever the source has been given until now.
        return stamped or [Stamp.of_devices([source])]

    def order_copy_after(self, source: Device) -> None:
        """Let the copy wait for what was just given to the source's current streams."""
        Stamp.of_streams([source]).hold_back(self.device)

    def keep(self, value: Any) -> None:
        """Keep what a copy reads alive until it is done."""
        self._read.append(value)

    def _wait_here(self) -> None:
        if not self._waited_here:
            self._waited_here = True
            for stamp in self._after:
                stamp.hold_back_unless_done(self.device, of=self.device)

    def _finish(self) -> None:
        if not self._read:
            return
        done = Stamp.of_streams([self.device])
        if self._guard_source:
            for source in self._sources:
                if source is not self.device:
                    done.hold_back(source)
        self.hold_sources(done)

    def hold_sources(self, done: Stamp) -> None:
        """Keep alive what is read, until it was."""
        hold(done, *self._read)


class HostMove(Move):
    """One call of ``to_device`` to the host, and all those inside it.

    Each copy is complete when its function returns: nothing is held, and no stream waits for it.
    """

    def __init__(self, after: After = None) -> None:
        host: Any = Host()
        super().__init__(host, after)

    def leaf(self, value: Any) -> Any:
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        moved = value
        places = nbytes_by_device(value)
        if places:
            place = next(iter(places))
            copy = to_host.find(type(value))
            if copy is None:
                raise cannot_be_copied(value, place)
            for source in places:
                self.order(source)
            with place:
                moved = copy(value)
        return self._memo.setdefault(id(value), (value, moved))[1]

    def order(self, source: Device, *, on_source: bool = False) -> None:
        if source not in self._sources:
            self._sources[source] = self.work_of(source)
            for stamp in self._sources[source]:
                stamp.hold_back(source, of=source)


class ToDevice(Registry):
    """The type of :data:`to_device`, a function: take a value to a device. Its call is below."""

    def __init__(self) -> None:
        super().__init__("to_device", _stay)

    def function_of(self, kind: type) -> Callable[[Any, Device], Any]:
        """Return what takes values of a registered type to a device."""
        found = self.find(kind)
        if found is None:
            return _stay if device_of.find(kind) is None else _stay_unmoved
        return found  # type: ignore[no-any-return]

    def __call__(
        self,
        value: T,
        device: object,
        *,
        after: After = None,
        copy: bool = False,
        guard_source: bool = True,
    ) -> T:
        """Return a value as it is on a device: copied there where it lives on another.

        Parameters
        ----------
        value
            Anything. What lives in host memory stays there. Containers and objects of Python
            classes are looked into; those in which nothing moves are returned themselves, the
            others made again around what stays. What is referenced twice is copied once. Nothing
            is written to the value.
        device
            What :class:`~dask_devctx.Device` accepts, or ``"cpu"``: the host, where a CuPy array
            becomes a NumPy array, a torch tensor one of the CPU.
        after
            Stamps of the work that makes the value; see :func:`stamp`. Without one for the
            device that the value is on, everything that device has been given so far.
        copy
            Also copy what is on the device already: the caller is going to write to it.
        guard_source
            Let this thread's current streams of the source wait for the copy, so that it may be
            written to as soon as this returns. False where nobody writes to it, as dask's tasks
            do not to their inputs: the source's device is not slowed down.

        Returns
        -------
        object
            It may be used on this thread's current streams of the device. Another thread lets its
            streams wait for a stamp of it first.

        Raises
        ------
        DeviceNotFoundError
            There is no such device.
        ValueNotMovableError
            It holds what has to move, and cannot be made again around it.
        DriverError
            The driver refuses.
        MemoryError
            The device has not enough memory left, in the library's own words: torch's is a
            ``RuntimeError``.

        Notes
        -----
        Does not wait for any device; to the host it waits for the copy. The copy is ordered after
        the work that makes the value and before what this thread's current streams are given later;
        the source is kept alive until it was read. The device current before is current after.

        A type is made known in two functions. That of ``to_device.register(T)`` is called for a
        value on another device with ``device`` current, the ordering done, and whatever the value
        refers to kept alive; it may call ``to_device`` for its parts. For the host there is a third
        function, that of ``to_host.register(T)``.

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
        if walk.find(type(value)) is None:
            return value
        move = _thread.move
        if is_host(device):
            if isinstance(move, HostMove):
                return move.take(value)  # type: ignore[no-any-return]
            return HostMove(after).run(value)  # type: ignore[no-any-return]
        device = Device(device)
        if move is not None and move.device is device:
            return move.take(value)  # type: ignore[no-any-return]
        if not nbytes_by_device(value):
            return value
        move = Move(device, after, copy=copy, guard_source=guard_source)
        return move.run(value)  # type: ignore[no-any-return]


class _Thread(threading.local):
    move: Move | None = None


_thread = _Thread()
to_device = ToDevice()


def current_move() -> Move:
    """Return the move that a registered function is called in."""
    assert _thread.move is not None
    return _thread.move
