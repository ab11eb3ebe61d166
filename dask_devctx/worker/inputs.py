"""The inputs of a worker's tasks: brought to each task's device, before it and in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from tornado.ioloop import IOLoop, PeriodicCallback

from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.transfer import Stamp, nbytes_by_device, release_held, stamp, walk
from dask_devctx.transfer.lifetime import Lifetime
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.replicas import Replicas
from dask_devctx.worker import arguments

logger = logging.getLogger(__name__)

# How often memory is let go of that a copy has read by now, where nothing else is moved.
_RELEASE_INTERVAL_MS = 500
# How often a task that ran out of memory looks whether what reads the dropped copies is done.
_LOOK_INTERVAL_S = 0.001


# Those of a task's inputs that were brought: the copies, each with the lifetime of its source.
Copies = list[tuple[Lifetime, Any]]

# Of what nobody knows when it goes: no copy of it is kept.
_UNKNOWN = Lifetime()
_UNKNOWN.ended = True
# Of what is on no device.
_ON_THE_HOST = Stamp({}, {})


class Input:
    """One value that a task is given. Where it is, is found out once, when somebody asks.

    Parameters
    ----------
    key, value
        The value, and its key.
    inputs
        Knows of its copies; None where none are made.
    """

    __slots__ = ("_inputs", "_nbytes", "key", "value")

    def __init__(self, key: Hashable, value: object, inputs: Inputs | None) -> None:
        self.key = key
        self.value = value
        self._inputs = inputs
        self._nbytes: Mapping[Device, int] | None = None

    @property
    def nbytes(self) -> Mapping[Device, int]:
        """About how many bytes it has on which devices; empty for what is on the host.

        So is what cannot be told, as somebody's type raised: the task asks again when it is given
        the value, and fails with that. A large value of which nobody knows is looked at in part,
        for less than a millisecond: the task looks again.
        """
        if self._nbytes is None:
            lifetime = None if self._inputs is None else self._inputs.lifetimes.get(self.key)
            if lifetime is not None and lifetime.places is not None:
                self._nbytes = lifetime.places
                return self._nbytes
            try:
                self._nbytes, complete = nbytes_by_device.estimated(self.value)
            except Exception:
                logger.debug("where %r is cannot be told", self.key, exc_info=True)
                self._nbytes, complete = {}, False
            if complete and lifetime is not None:
                lifetime.places = self._nbytes
        return self._nbytes

    @property
    def copies(self) -> Collection[Device]:
        """The devices that have a copy of it."""
        return () if self._inputs is None else self._inputs.copies_of(self.key)


class Inputs:
    """What the tasks of one worker are given, on their devices.

    Parameters
    ----------
    limit
        How much of each device's memory copies may take, as a fraction.

    Attributes
    ----------
    lifetimes
        By key, of the values in the worker's memory that a task made here, or that one is given:
        looking one up begins it where it is not known, :meth:`forget` ends it.

    Notes
    -----
    :meth:`bring`, :meth:`made` and :meth:`gave_up` are called on the task's thread, inside its
    device's scope; all else from the worker's event loop, but for :meth:`drop_replicas`, which is
    called from either. One thread of its own starts copies ahead of their tasks, and drops those of
    values that dask let go.

    Copies belong to a value's :class:`~dask_devctx.transfer.lifetime.Lifetime` and not to its key:
    a task that was cancelled runs on with values that dask has let go, and a copy that was to be
    made ahead may have its turn when they are gone.
    """

    metric: Final = "devctx-traffic"

    def __init__(self, limit: float) -> None:
        arguments.register()
        self.replicas = Replicas(limit=limit)
        self.lifetimes: defaultdict[Hashable, Lifetime] = defaultdict(Lifetime)
        self._event_loop = threading.get_ident()
        # No executor: a future for each task costs the event loop ten times what this does.
        self._later: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._open = True
        threading.Thread(target=self._do_later, name="devctx-copies", daemon=True).start()
        self._loop = IOLoop.current()
        self._releasing = PeriodicCallback(self._release, _RELEASE_INTERVAL_MS)
        self._release()

    def close(self) -> None:
        """Start no more copies, and forget those that are there; what is read stays until then."""
        self._open = False
        self._later.put(None)
        for lifetime in self.lifetimes.values():  # what runs now keeps no copies any more
            self.replicas.forget(lifetime)
        self.lifetimes.clear()
        self._release()

    def _release(self) -> None:
        """Let go of what was read, now and later: while it is open, or something is still read."""
        if not release_held() and not self._open:
            self._releasing.stop()
        elif not self._releasing.is_running():
            self._releasing.start()

    # -- a value's way

    def arrived(self, key: Hashable, after: Stamp) -> None:
        """Note of which work the value of a key is that a task has made here."""
        self.forget(key)
        self.lifetimes[key] = Lifetime(after)

    def forget(self, key: Hashable) -> None:
        """Drop the copies of what a key stood for: dask has let it go."""
        lifetime = self.lifetimes.pop(key, None)
        if lifetime is not None:
            lifetime.ended = True
            if lifetime.copied:  # what is freed then, and the lock, are not for the event loop
                self._later.put(partial(self.replicas.forget, lifetime))

    def read_back(self, key: Hashable) -> None:
        """Note that the value of a key comes from disk now: not of the work that was noted."""
        lifetime = self.lifetimes.get(key)
        if lifetime is not None:
            lifetime.after = lifetime.places = None

    def copies_of(self, key: Hashable) -> Collection[Device]:
        """Return the devices that have a copy of a key's value."""
        lifetime = self.lifetimes.get(key)
        return () if lifetime is None or not lifetime.copied else self.replicas.devices(lifetime)

    def hold_back_for(self, keys: Iterable[Hashable]) -> None:
        """Let what this thread's streams are given next wait for the work that makes some values.

        For those that are read where nothing brings them: on the worker's default streams.
        """
        for key in keys:
            lifetime = self.lifetimes.get(key)
            after = None if lifetime is None else lifetime.after
            if after is not None:
                after.hold_back_readers()

    # -- a task's way

    def start_moving(
        self,
        inputs: Iterable[Input],
        lifetimes: Mapping[Hashable, Lifetime],
        device: Device,
    ) -> None:
        """Begin to copy what a task will need, while it waits for its turn.

        Parameters
        ----------
        inputs
            Those that the worker has by now.
        lifetimes
            The lifetimes of its inputs.
        device
            The task's device. No more is brought than there is room for: what is not brought
            ahead is when the task's turn comes.
        """
        far = []
        for one in inputs:
            places = one.nbytes
            nbytes = sum(places.values()) - places.get(device, 0)
            lifetime = lifetimes.get(one.key)
            if nbytes and lifetime is not None and device not in one.copies:
                far.append((one, lifetime, nbytes))
        if far:  # else that thread is not woken: it would take Python's lock from the others
            self._later.put(partial(self._move_ahead, far, device))

    def _do_later(self) -> None:
        while (do := self._later.get()) is not None:
            do()
            del do  # while nothing is to be done, nothing is kept

    def _move_ahead(self, far: Iterable[tuple[Input, Lifetime, int]], device: Device) -> None:
        for one, lifetime, nbytes in far:
            try:
                wanted = self._open and not lifetime.ended
                if wanted and self.replicas.wants(lifetime, device, nbytes):
                    if lifetime.places is None:
                        lifetime.places = nbytes_by_device(one.value)
                    after = lifetime.after
                    self.replicas.get(
                        lifetime, one.value, device, after=after, ahead=True, places=lifetime.places
                    )
            except Exception:  # the task will try for itself, and fail with this if it must
                logger.debug("%r was not brought to %s ahead", one.key, device, exc_info=True)

    def bring(
        self, data: Mapping[Hashable, Any], lifetimes: Mapping[Hashable, Lifetime], device: Device
    ) -> tuple[dict[Hashable, Any], Copies]:
        """Return a task's inputs as they are on its device, and which of them are copies."""
        inputs, copies = {}, []
        for key, value in data.items():
            lifetime = lifetimes.get(key, _UNKNOWN)
            places = lifetime.places
            if places is None:
                places = nbytes_by_device(value)
                if lifetime is not _UNKNOWN:
                    lifetime.places = places  # looked for once, also where there is nothing
            if not places:
                inputs[key] = value
                continue
            # Of what arrived from elsewhere, or was there before, nobody knows the work.
            after = lifetime.after
            if after is None:
                after = Stamp.of_devices(places)
                if lifetime is not _UNKNOWN:
                    lifetime.after = after
            inputs[key] = here = self.replicas.get(
                lifetime, value, device, after=after, places=places
            )
            if here is not value:
                copies.append((lifetime, here))
        return inputs, copies

    def bring_arguments(self, task: Any, device: Device) -> Any:
        """Return a task with the arrays that it keeps itself on its device, given by value.

        Parameters
        ----------
        task
            dask's node of the graph. It is not changed: it may run again, on another device.
        device
            The task's device, which is current.
        """
        if arguments.may_hold_arrays(task) and nbytes_by_device.found_in(task).keys() - {device}:
            return Move(device, guard_source=False).run(task)
        return task

    def made(self, result: object, copies: Copies, device: Device) -> Stamp | None:
        """Note that a task has given all its work to its device.

        Returns
        -------
        Stamp or None
            Of the work that makes its result, for :meth:`arrived`; None of a number or the like.
        """
        after = None
        if walk.find(type(result)) is not None:
            after = stamp(result) or _ON_THE_HOST  # nobody looks again
        if copies:
            # A result on the host says nothing of work that may not be done.
            known = after is not None and device in after.devices
            self._used(copies, device, after if known else Stamp.of_devices([device]))
        return after

    def gave_up(self, copies: Copies, device: Device) -> None:
        """Note that a task raised: what it gave to its device until then may still run."""
        if copies:
            with suppress(DevctxError):  # the device is not well; the task's own exception counts
                self._used(copies, device, Stamp.of_devices([device]))

    def _used(self, copies: Copies, device: Device, after: Stamp | None) -> None:
        self.replicas.used(copies, device, after)
        if not self._open:  # the task outlived the plugin, and nobody looks any more
            self._loop.add_callback(self._release)

    def drop_replicas(self, device: Device) -> int:
        """Drop the copies on a device whose memory ran out; return their bytes."""
        dropped = self.replicas.drop_all(device)
        if dropped and threading.get_ident() != self._event_loop:
            # The memory of one that is being read is there when that is done.
            with suppress(DevctxError):
                reading = Stamp.of_devices([device])
                while not reading.done():
                    time.sleep(_LOOK_INTERVAL_S)
        release_held()
        return dropped

    def metrics(self, worker: object) -> list[dict[str, Any]]:
        """Return what the worker's heartbeat tells: a row for each pair of devices, plain data.

        ``nbytes`` and ``copies`` count what was moved, ``saved`` the times that a task found its
        input there already; ``seconds`` is the time that threads spent on starting the copies.
        """
        return [
            {
                "source": source.uuid,
                "destination": destination.uuid,
                "nbytes": traffic.nbytes,
                "copies": traffic.copies,
                "saved": traffic.saved,
                "seconds": traffic.seconds,
            }
            for (source, destination), traffic in self.replicas.traffic.items()
        ]
