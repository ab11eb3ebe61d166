"""The inputs of a worker's tasks: copied to each task's device, before the task and in order."""

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
from dask_devctx.worker.inputs import arguments
from dask_devctx.worker.inputs.one_input import Input
from dask_devctx.worker.memory.kept import Kept

logger = logging.getLogger(__name__)

# How often memory that finished copies have read is released, if no other values move.
_RELEASE_INTERVAL_MS = 500
# How often a task that ran out of memory checks whether the readers of dropped copies are done.
_LOOK_INTERVAL_S = 0.001


# The copies among a task's inputs, each with the lifetime of its source.
Copies = list[tuple[Lifetime, Any]]

# The lifetime of a value whose end is unknown: no copy of it is kept.
_UNKNOWN = Lifetime()
_UNKNOWN.ended = True
# The stamp of a value that is on no device.
_ON_THE_HOST = Stamp({}, {})


class Inputs:
    """Copies the inputs of one worker's tasks to the tasks' devices.

    Parameters
    ----------
    limit
        The fraction of each device's memory that copies may take.

    Attributes
    ----------
    ahead
        Is held while an input is copied ahead of its task.
    holds_back
        Returns whether nothing is copied to a device ahead of tasks, since one has it for itself.
    lifetimes
        The lifetimes, by key, of values in the worker's memory that a task made here or gets as
        input. A look-up begins a lifetime that is not known; :meth:`forget` ends it.

    Notes
    -----
    :meth:`bring`, :meth:`made` and :meth:`gave_up` are called on the task's thread, inside its
    device's scope. :meth:`drop_replicas` is called there or on the worker's event loop, and all
    other methods on the event loop. A separate thread starts copies ahead of their tasks, and drops
    the copies of values that dask has released.

    Copies belong to a value's :class:`~dask_devctx.transfer.lifetime.Lifetime` and not to its key:
    a cancelled task still runs with values that dask has released, and the turn of a copy ahead may
    come after its value is gone.
    """

    metric: Final = "devctx-traffic"

    def __init__(self, limit: float) -> None:
        arguments.register()
        self.replicas = Replicas(limit=limit)
        self.lifetimes: defaultdict[Hashable, Lifetime] = defaultdict(Lifetime)
        self.holds_back: Callable[[Device], bool] = lambda device: False
        self._event_loop = threading.get_ident()
        self.ahead = threading.Lock()
        # No executor: a future for each task costs the event loop ten times what this does.
        self._later: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._open = True
        threading.Thread(target=self._do_later, name="devctx-copies", daemon=True).start()
        self._loop = IOLoop.current()
        self._releasing = PeriodicCallback(self._release, _RELEASE_INTERVAL_MS)
        self._release()

    def close(self) -> None:
        """Start no more copies, and drop all copies; memory that is being read stays until then."""
        self._open = False
        self._later.put(None)
        for lifetime in self.lifetimes.values():  # running tasks keep no copies from now on
            self.replicas.forget(lifetime)
        self.lifetimes.clear()
        self._release()

    def _release(self) -> None:
        """Release memory that was read, repeatedly until this is closed and all memory is read."""
        if not release_held() and not self._open:
            self._releasing.stop()
        elif not self._releasing.is_running():
            self._releasing.start()

    # -- values

    def arrived(self, key: Hashable, after: Stamp) -> None:
        """Note the work that makes the value of a key, after a task of this worker returned."""
        self.forget(key)
        self.lifetimes[key] = Lifetime(after)

    def forget(self, key: Hashable) -> None:
        """Drop the copies of a key's value, which dask has released."""
        lifetime = self.lifetimes.pop(key, None)
        if lifetime is not None:
            lifetime.ended = True
            if lifetime.copied:  # freeing memory, and the lock, would delay the event loop
                self._later.put(partial(self.replicas.forget, lifetime))

    def read_back(self, key: Hashable) -> None:
        """Note that a key's value was read from disk: the work noted before did not make it."""
        lifetime = self.lifetimes.get(key)
        if lifetime is not None:
            lifetime.after = lifetime.places = None

    def copies_of(self, key: Hashable) -> Collection[Device]:
        """Return the devices that have a copy of a key's value."""
        lifetime = self.lifetimes.get(key)
        return () if lifetime is None or not lifetime.copied else self.replicas.devices(lifetime)

    def stamps_of(self, keys: Iterable[Hashable]) -> list[Stamp]:
        """Return the stamps of some values' work; values whose work is unknown have none."""
        known = self.lifetimes
        return [after for key in keys if key in known and (after := known[key].after) is not None]

    # -- tasks

    def start_moving(
        self,
        inputs: Iterable[Input],
        lifetimes: Mapping[Hashable, Lifetime],
        device: Device,
        *others: Device,
    ) -> None:
        """Begin to copy a task's inputs while the task waits for its turn.

        Parameters
        ----------
        inputs
            The inputs that the worker has by now.
        lifetimes
            The lifetimes of the task's inputs.
        device
            The task's device. Inputs are copied ahead only as far as there is room; the others are
            copied when the task's turn comes.
        others
            Its other devices. Inputs that live on its devices stay there.
        """
        far = []
        for one in inputs:
            places = one.nbytes
            if others and places.keys() <= {device, *others}:
                continue
            nbytes = sum(places.values()) - places.get(device, 0)
            if one.value.__class__ is Kept and one.value.is_away:
                nbytes = 1  # it comes from the host
            lifetime = lifetimes.get(one.key)
            if nbytes and lifetime is not None and device not in one.copies:
                far.append((one, lifetime, nbytes))
        if far:  # do not wake the thread for nothing: it takes Python's lock from other threads
            self._later.put(partial(self._move_ahead, far, device))

    def _do_later(self) -> None:
        while (do := self._later.get()) is not None:
            do()
            del do  # keep no values while the thread waits

    def _move_ahead(self, far: Iterable[tuple[Input, Lifetime, int]], device: Device) -> None:
        for one, lifetime, nbytes in far:
            with self.ahead:
                if not self._open or lifetime.ended or self.holds_back(device):
                    continue
                try:
                    if (kept := one.value).__class__ is not Kept:
                        self._copy_ahead(lifetime, kept, device, nbytes)
                    elif (memory := kept.memory) is not None:
                        value = memory.pin(kept, device)
                        try:
                            self._copy_ahead(lifetime, value, device, nbytes)
                        finally:
                            del value
                            memory.unpin([kept])
                except Exception:  # the task tries again, and fails with this error if it remains
                    logger.debug("%r was not copied ahead to %s", one.key, device, exc_info=True)

    def _copy_ahead(self, lifetime: Lifetime, value: Any, device: Device, nbytes: int) -> None:
        if self.replicas.wants(lifetime, device, nbytes):
            if lifetime.places is None:
                lifetime.places = nbytes_by_device(value)
            after, places = lifetime.after, lifetime.places
            self.replicas.get(lifetime, value, device, after=after, ahead=True, places=places)

    def brought(self, kept: Kept, places: Mapping[Device, int], after: Stamp) -> None:
        """Note that a value came back from host memory; on any thread."""
        lifetime = self.lifetimes.get(kept.key)
        if lifetime is not None and not kept.released:  # asked last: it may be another value's
            lifetime.places, lifetime.after = places, after

    def work_of(self, kept: Kept) -> Stamp | None:
        """Return the stamp of the work that makes a value, if it is known; on any thread."""
        lifetime = self.lifetimes.get(kept.key)
        return None if lifetime is None or kept.released else lifetime.after

    def bring(
        self,
        data: Mapping[Hashable, Any],
        lifetimes: Mapping[Hashable, Lifetime],
        device: Device,
        *others: Device,
    ) -> tuple[dict[Hashable, Any], Copies]:
        """Return a task's inputs on its device, and the copies among them.

        An input that lives on its devices, where these are several, stays where it is.
        """
        inputs, copies = {}, []
        for key, value in data.items():
            lifetime = lifetimes.get(key, _UNKNOWN)
            places = lifetime.places
            if places is None:
                places = nbytes_by_device(value)
                if lifetime is not _UNKNOWN:
                    lifetime.places = places  # looked up once, also if it is empty
            if not places:
                inputs[key] = value
                continue
            # The work is unknown for a value that came from elsewhere, or was there before.
            after = lifetime.after
            if after is None:
                after = Stamp.of_devices(places)
                if lifetime is not _UNKNOWN:
                    lifetime.after = after
            if others and places.keys() <= {device, *others}:
                inputs[key] = value
                for one in {device, *places}:  # any of them may read it, and must find it there
                    after.hold_back(one)
                copies.append((lifetime, value))
                continue
            inputs[key] = here = self.replicas.get(
                lifetime, value, device, after=after, places=places
            )
            if here is not value:
                copies.append((lifetime, here))
        return inputs, copies

    def bring_arguments(self, task: Any, device: Device, *others: Device) -> Any:
        """Return a task whose own arrays, given by value, are on its device.

        Parameters
        ----------
        task
            dask's node of the graph. It is not changed: it may run again, on another device.
        device
            The task's device, which is current.
        others
            Its other devices: arrays on these stay there.
        """
        if arguments.may_hold_arrays(task) and (
            nbytes_by_device.found_in(task).keys() - {device, *others}
        ):
            return Move(device, guard_source=False).run(task)
        return task

    def made(self, result: object, copies: Copies, device: Device, *others: Device) -> Stamp | None:
        """Note that a task has given all its work to its devices.

        Returns
        -------
        Stamp or None
            The stamp of the work that makes its result, for :meth:`arrived`; None for a result that
            holds no arrays, such as a number.
        """
        after = None
        if not walk.is_plain(result):
            after = stamp(result) or _ON_THE_HOST  # so that it is not looked up again
        if others:  # any of the devices may have made the value, wherever it is
            everything = Stamp.of_devices(
                dict.fromkeys((device, *others, *(after.devices if after else ()))),
                None if after is None else after.places,
            )
            self._used(copies, device, everything)
            return everything if after is not None and after.devices else after
        if copies:
            # A result on the host does not show whether the device's work is done.
            known = after is not None and device in after.devices
            self._used(copies, device, after if known else Stamp.of_devices([device]))
        return after

    def gave_up(self, copies: Copies, device: Device, *others: Device) -> None:
        """Note that a task raised: its work on the devices may still run."""
        if copies:
            with suppress(DevctxError):  # the device failed; the task's own exception counts
                self._used(copies, device, Stamp.of_devices([device, *others]))

    def _used(self, copies: Copies, device: Device, after: Stamp | None) -> None:
        self.replicas.used(copies, device, after)
        if not self._open:  # the task outlived the plugin, whose periodic release has stopped
            self._loop.add_callback(self._release)

    def drop_replicas(self, device: Device) -> int:
        """Drop the copies on a device whose memory ran out; return their bytes."""
        dropped = self.replicas.drop_all(device)
        if dropped and threading.get_ident() != self._event_loop:
            # A copy that is being read frees its memory when the read is done.
            with suppress(DevctxError):
                reading = Stamp.of_devices([device])
                while not reading.done():
                    time.sleep(_LOOK_INTERVAL_S)
        release_held()
        return dropped

    def metrics(self, worker: object) -> list[dict[str, Any]]:
        """Return the heartbeat's rows, one for each pair of devices, as plain data.

        ``nbytes`` and ``copies`` count the copied bytes and values, and ``saved`` the times that a
        copy was there already. ``seconds`` is the time that threads spent on starting the copies,
        and ``measured_s`` the time that devices took for ``measured_nbytes`` of them.
        """
        self.replicas.counts.measure()
        return [
            {
                "source": source.uuid,
                "destination": destination.uuid,
                "nbytes": traffic.nbytes,
                "copies": traffic.copies,
                "saved": traffic.saved,
                "seconds": traffic.seconds,
                "measured_nbytes": traffic.measured_nbytes,
                "measured_s": traffic.measured_s,
            }
            for (source, destination), traffic in self.replicas.traffic.items()
        ]
