"""The device memory of one worker: counts the values that dask keeps, and moves them."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from dask.utils import format_bytes

from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.cuda.out_of_memory import is_out_of_memory, release_library_caches
from dask_devctx.driver import statuses
from dask_devctx.errors import DevctxError, DriverError
from dask_devctx.transfer import Stamp, nbytes_by_device, release_held, walk
from dask_devctx.transfer.blocks import Memory, memories
from dask_devctx.transfer.page_locked import PageLockedPool
from dask_devctx.worker.memory.host_form import HostForm, Sent
from dask_devctx.worker.memory.kept import AWAY, Kept
from dask_devctx.worker.memory.ledger import Ledger, in_order_of_leaving
from dask_devctx.worker.threads.executors import near_cpus

if TYPE_CHECKING:
    from dask_devctx.worker.memory.surroundings import Surroundings

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 0.5
# A thread that waits for memory looks again this often, in case nobody wakes it.
_WAIT_S: Final = 0.5
# The fraction of a device's memory that stays free for others.
_SPARE: Final = 0.02


class DeviceMemory:
    """Keeps the values on a worker's devices within limits; those beyond go to host memory.

    Parameters
    ----------
    limits
        The limit of each device in bytes.
    pool
        Host memory for the values that leave.
    around
        The parts of the worker that it concerns.
    on_failure
        Called with a device that failed, and the driver's error.

    Notes
    -----
    Thread-safe. Each device has a thread that moves its values to host memory. They come back on
    the thread of their task, or ahead of it on the thread that copies inputs.
    """

    def __init__(
        self,
        limits: Mapping[Device, int],
        pool: PageLockedPool,
        around: Surroundings,
        on_failure: Callable[[Device, DriverError], object] = lambda device, error: None,
    ) -> None:
        self.pool = pool
        self._around = around
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._ledgers = {
            device: Ledger(device, limit, threading.Condition(self._lock))
            for device, limit in limits.items()
        }
        self._ended: deque[tuple[Device | None, int, frozenset[Memory]]] = deque()
        self._numbers = itertools.count(1)
        self._handed: dict[Hashable, tuple[Device, int]] = {}
        self._coming: dict[int, Future[None]] = {}
        self._expected: dict[str, int] = {}
        self._told: set[type] = set()
        self._told_of_spilling = False
        self._grow = threading.Event()
        # Not where a pool has the memory: then the driver's free memory says nothing.
        self.looks_at_others = True
        self.open = True
        self.on_disk = False  # whether values went to disk
        threading.Thread(target=self._grow_ahead, name="devctx-memory-host", daemon=True).start()
        for device, ledger in self._ledgers.items():
            name = f"devctx-memory-{device}"
            threading.Thread(
                target=self._keep_below, args=(ledger,), name=name, daemon=True
            ).start()

    def stop(self) -> None:
        """Move no more values to host memory; those that are there still come back when read."""
        with self._lock:
            self.open = False
            self._grow.set()
            for ledger in self._ledgers.values():
                ledger.changed.notify_all()

    # -- values

    def keep(self, key: Hashable, value: Any) -> Kept | None:
        """Count a value from now on; None for a value that is on no device of the worker."""
        try:
            places = self._around.places(key)
            if places is None:
                places = nbytes_by_device.estimated(value).places
        except Exception:  # of a user's type; the task that gets the value fails with it
            return None
        if not places or not self.open:
            return None
        kept = Kept(key, value, self)
        kept.places = places
        kept.stays = len(places) > 1 or next(iter(places)) not in self._ledgers
        kept.memories = self._memories(value, places)
        with self._lock:
            self._add(kept)
            self.handed_over(key)
            for device in places:
                self._look(device)
        return kept

    def adopt(self, kept: Kept) -> None:
        """Count a value that was read from disk."""
        with self._lock:
            if kept.memory is None and kept.form is not None:
                if kept.form.home not in self._ledgers:
                    kept.form.home = next(iter(self._ledgers))
                kept.memory = self
                kept.form.members = [weakref.ref(kept)]
                self._count_away(kept, +1)

    def take_over(self, kept: Kept) -> None:
        """Count a value that another manager has kept."""
        with self._lock:
            kept.memory = self
            if kept.is_away:
                self._count_away(kept, +1)
            else:
                self._add(kept)

    def ended(self, kept: Kept) -> None:
        """Stop counting a value that was released; called by the garbage collector."""
        if kept.value is AWAY:
            if kept.form is not None:
                self._ended.append((kept.form.home, kept.form.share, frozenset()))
        else:
            self._ended.append((None, 0, kept.memories))

    def to_send(self, kept: Kept, *, whole: bool) -> Any:
        """Return a value on its device; or else a stand-in that is the value in another process.

        ``whole`` gives the :class:`Kept` itself, for a process that keeps it in host memory.
        """
        with self._lock:
            kept.touched = next(self._numbers)
            if not kept.is_away:
                return kept.value
            assert kept.form is not None
            return kept if whole else Sent(kept.form, kept.index)

    def read(self, kept: Kept) -> Any:
        """Return the value on its device, for any reader; its work on this thread comes after."""
        value = self.pin(kept, None)
        if kept.after is not None:
            kept.after.hold_back_readers()
        self.unpin([kept])
        return value

    def pin(self, kept: Kept, device: Device | None, *, wait: bool = True) -> Any:
        """Return a value, which stays on its device until :meth:`unpin`.

        Parameters
        ----------
        kept
            The value.
        device
            The device on which it comes back from host memory; None for the device that it left.
        wait
            Whether to wait until other values have made room for it.
        """
        if kept.memory is None:
            self.adopt(kept)
        with self._lock:
            kept.pins += 1
            kept.touched = next(self._numbers)
            value = kept.value
        if value is not AWAY:
            return value
        try:
            return self._bring(kept, device, wait=wait)
        except BaseException:
            self.unpin([kept])
            raise

    def unpin(self, values: Sequence[Kept]) -> None:
        """Let values leave their devices again."""
        with self._lock:
            for kept in values:
                kept.pins -= 1
            for ledger in self._ledgers.values():
                if ledger.waiting:
                    ledger.changed.notify_all()

    # -- room

    def used(self, device: Device) -> int:
        """Return the bytes of a device that count towards its limit."""
        ledger = self._ledgers[device]
        with self._lock:
            self._settle()
            return ledger.held + ledger.incoming + self._around.copies(device)

    def make_room(self, device: Device, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve bytes on a device, after others have left it; :meth:`give_room` undoes it.

        Returns
        -------
        bool
            Whether they are within the limit. If nothing can leave, they are reserved beyond it.
        """
        ledger = self._ledgers.get(device)
        if ledger is None:
            return True
        while True:
            over = self.used(device) + nbytes - ledger.limit
            if over <= 0 or not wait or ledger.stopped:
                break
            if self._around.drop_copies(device, over):
                release_held()
                continue
            with self._lock:
                ledger.demand = max(ledger.demand, over)
                answers = ledger.answers
                ledger.waiting += 1
                ledger.changed.notify_all()
                try:
                    if ledger.answers == answers and not ledger.stopped:
                        ledger.changed.wait(_WAIT_S)
                finally:
                    ledger.waiting -= 1
                if ledger.answers != answers and not ledger.moved_last:
                    break  # nothing can leave now
        with self._lock:
            ledger.incoming += nbytes
        return over <= 0

    def give_room(self, device: Device, nbytes: int) -> None:
        """Undo a reservation."""
        ledger = self._ledgers.get(device)
        if ledger is not None:
            with self._lock:
                ledger.incoming -= nbytes

    def hand_over(self, key: Hashable, device: Device, nbytes: int) -> None:
        """Keep a reservation until a key's value is counted, or :meth:`handed_over` is called."""
        with self._lock:
            self.handed_over(key)
            self._handed[key] = device, nbytes

    def handed_over(self, key: Hashable) -> None:
        """Undo the reservation for a key's value, if there is one."""
        if self._handed:
            with self._lock:
                device, nbytes = self._handed.pop(key, (None, 0))
                if device is not None:
                    self.give_room(device, nbytes)

    def expected(self, prefix: str) -> int:
        """Return how many bytes a task of this prefix will probably make."""
        return self._expected.get(prefix, 0)

    def made(self, prefix: str, nbytes: int) -> None:
        """Learn how many bytes a task of this prefix has made."""
        self._expected[prefix] = nbytes

    def spill_all(self, device: Device) -> int:
        """Move all values that are not in use from a device that ran out of memory; wait for it."""
        ledger = self._ledgers.get(device)
        if ledger is None or not self.open:
            return 0
        with self._lock:
            before = ledger.held
        for group in self._groups(ledger, ledger.limit):
            self._leave(ledger, group)
        release_held()
        with self._lock:
            self._settle()
            return max(before - ledger.held, 0)

    def spill_clean(self, nbytes: int) -> bool:
        """Give back host memory of values that are on their devices again."""
        with self._lock:
            clean = [
                kept
                for ledger in self._ledgers.values()
                for kept in ledger.values()
                if kept.form is not None and not kept.is_away
            ]
            clean.sort(key=lambda kept: kept.touched)
            freed = 0
            while clean and freed < nbytes:
                kept = clean.pop(0)
                freed += kept.form.nbytes if kept.form is not None else 0
                kept.form = None
        return freed > 0

    # The limit, the bytes on the device and those that left it; then the moves since the start.
    counts: Final = (
        *("limit", "held", "spilled"),
        *("spills", "spilled_nbytes", "unspills", "unspilled_nbytes"),
    )

    def count(self, name: str, device: Device) -> int | None:
        """Return one of the ``counts`` of a device; None for a device without a limit."""
        ledger = self._ledgers.get(device)
        if ledger is None:
            return None
        with self._lock:
            self._settle()
            return int(getattr(ledger, name))

    # -- the books; with the lock held

    def _memories(self, value: Any, places: Mapping[Device, int]) -> frozenset[Memory]:
        try:
            found = memories(value)
        except Exception:
            found = None
        if found is None:
            found = {Memory(device, 0, nbytes) for device, nbytes in places.items()}
        # An allocation without an address is nobody else's.
        return frozenset(
            one if one.base else one._replace(base=-next(self._numbers)) for one in found
        )

    def _add(self, kept: Kept) -> None:
        self._settle()
        kept.touched = next(self._numbers)
        for memory in kept.memories:
            ledger = self._ledgers.get(memory.device)
            if ledger is not None:
                ledger.add(memory, kept)

    def _settle(self) -> None:
        """Count off the values that were released."""
        while self._ended:
            home, nbytes, gone = self._ended.popleft()
            if home is not None and home in self._ledgers:
                self._ledgers[home].spilled -= nbytes
            for memory in gone:
                ledger = self._ledgers.get(memory.device)
                if ledger is not None:
                    ledger.forget_dead(memory)

    def _count_away(self, kept: Kept, sign: int) -> None:
        form = kept.form
        assert form is not None
        if form.home in self._ledgers:
            self._ledgers[form.home].spilled += sign * form.share

    def _look(self, device: Device) -> None:
        """Wake the thread that moves a device's values, if there is something to move."""
        ledger = self._ledgers.get(device)
        if ledger is not None and ledger.held + ledger.incoming > ledger.prepare:
            if not self._grow.is_set():
                self._grow.set()
            if ledger.held + ledger.incoming > ledger.start:
                ledger.changed.notify_all()

    # -- to host memory

    def _keep_below(self, ledger: Ledger) -> None:
        """Run a device's thread: move values away whenever more than the limit comes near."""
        cpus = near_cpus(ledger.device.info.cpu_affinity)
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)
        try:
            while self.open and not ledger.stopped:
                self._keep_below_once(ledger)
        finally:
            with self._lock:
                ledger.stopped = True
                ledger.changed.notify_all()

    def _keep_below_once(self, ledger: Ledger) -> None:
        with self._lock:
            wanted = self._wanted(ledger)
            if not wanted:
                ledger.changed.wait(_LOOK_INTERVAL_S)
                wanted = self._wanted(ledger)
            if not self.open:
                return
        try:
            if not wanted:
                self._look_at_others(ledger)
                return
            moved = self._move_away(ledger, wanted)
        except Exception as error:
            if isinstance(error, DriverError) and error.code in statuses.STICKY:
                self._on_failure(ledger.device, error)
                ledger.stopped = True
                return
            logger.warning("no values left %s", ledger.device, exc_info=True)
            moved = False
        with self._lock:
            ledger.answer(moved)
            if not moved and not ledger.waiting and self.open:
                ledger.changed.wait(_LOOK_INTERVAL_S / 10)  # until a value can leave

    def _wanted(self, ledger: Ledger) -> int:
        self._settle()
        demand, ledger.demand = ledger.demand, 0
        used = ledger.held + ledger.incoming + self._around.copies(ledger.device)
        if used > ledger.start:
            demand = max(demand, used - ledger.stop)
        return demand

    def _move_away(self, ledger: Ledger, wanted: int) -> bool:
        dropped = self._around.drop_copies(ledger.device, wanted)
        if dropped:
            release_held()
        if dropped >= wanted:
            return True
        moved = dropped > 0
        for group in self._groups(ledger, wanted - dropped):
            moved |= self._leave(ledger, group)
            with self._lock:
                ledger.answer(moved)  # a task may go on before the others have left
        return moved

    def _groups(self, ledger: Ledger, wanted: int) -> list[list[Kept]]:
        """Return values that leave next, those that share memory together."""
        with self._lock:
            self._settle()
            found: list[list[Kept]] = []
            gain = 0
            for kept in in_order_of_leaving(ledger, self._around.next_use):
                if gain >= wanted:
                    break
                if kept.leaving:
                    continue
                group = ledger.group(kept)
                if any(one.pins or one.leaving or one.stays or one.is_away for one in group):
                    continue
                for one in group:
                    one.leaving = True
                found.append(group)
                gain += ledger.gain(group)
        return found

    def _leave(self, ledger: Ledger, group: list[Kept]) -> bool:
        """Move values that share memory to host memory; return whether they went."""
        device, begun = ledger.device, perf_counter()
        form = group[0].form if len(group) == 1 else None
        copied = form is None
        try:
            if form is None:
                form = self._copied(group, device)
        except Exception as error:
            with self._lock:
                for kept in group:
                    kept.leaving = False
                    kept.stays = not isinstance(error, (DriverError, MemoryError, OSError))
            if not group[0].stays:
                raise
            self._tell_that_it_stays(group[0], error)
            return False
        with self._lock:
            for kept in group:
                kept.leaving = False
            if any(kept.pins for kept in group):  # a task needs it now
                return False
            values = [kept.value for kept in group]
            gain = ledger.gain(group)
            form.home = device
            form.members = [weakref.ref(kept) for kept in group]
            for index, kept in enumerate(group):
                self._forget(kept)
                kept.value, kept.form, kept.index = AWAY, form, index
                kept.places, kept.after = {}, None
            for kept in group:
                self._count_away(kept, +1)
            ledger.spills += len(group)
            ledger.spilled_nbytes += gain
            first, self._told_of_spilling = not self._told_of_spilling, True
        values.clear()  # frees the memory
        if copied:
            self._around.copied(device, form.nbytes, perf_counter() - begun, back=False)
        if first:
            logger.warning(  # once: dask shows no lines of a lower level
                "%s holds more than its limit of %s: values go to host memory, and come back "
                "before their tasks (device_memory_limit). report(client).devices counts them",
                device,
                format_bytes(ledger.limit),
            )
        for kept in group:
            self._around.moved(kept)
        self._grow.set()
        return True

    def _grow_ahead(self) -> None:
        """Run the thread that page-locks host memory before it is needed."""
        while self._grow.wait() and self.open:
            if not self.pool.grow_ahead():
                self._grow.clear()

    def _forget(self, kept: Kept) -> None:
        for memory in kept.memories:
            ledger = self._ledgers.get(memory.device)
            if ledger is not None:
                ledger.remove(memory, kept)
        kept.memories = frozenset()

    def _copied(self, group: Sequence[Kept], device: Device) -> HostForm:
        after = []
        for kept in group:
            stamp = kept.after or self._around.made_by(kept.key)
            if stamp is None or device not in stamp.devices:
                stamp = Stamp.of_devices([device])
            after.append(stamp)
        values = tuple(kept.value for kept in group)
        return HostForm.copied(values, device, after, self.pool.take)

    def copied(self, kept: Kept) -> HostForm:
        """Return a host form of a value that is on its device, where it stays."""
        value = self.pin(kept, None)
        try:
            device = next(iter(kept.places))
            return HostForm.copied(
                (value,), device, [Stamp.of_devices(kept.places)], self.pool.take
            )
        finally:
            self.unpin([kept])

    def _tell_that_it_stays(self, kept: Kept, error: Exception) -> None:
        kind = type(kept.value)
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(
                "values of the type %s stay on their devices, whatever the limit: they cannot be "
                "pickled without their device memory (%s: %s)",
                kind.__qualname__,
                type(error).__name__,
                error,
            )

    def _look_at_others(self, ledger: Ledger) -> None:
        """Give memory back to the driver when others have taken nearly all that is left."""
        if not ledger.held or not self.looks_at_others:
            return
        device = ledger.device
        found = discovery.memory_info(device._backend, device.info)
        if found is None or found[0] >= found[1] * _SPARE:
            return
        # A library may have just cached what was freed. So first only the caches go.
        with device:
            release_library_caches()
        found = discovery.memory_info(device._backend, device.info)
        if found is None or found[0] >= found[1] * _SPARE:
            return
        if self._move_away(ledger, int(found[1] * 2 * _SPARE) - found[0]):
            with device:
                release_library_caches()

    # -- back

    def _bring(self, kept: Kept, device: Device | None, *, wait: bool) -> Any:
        while True:
            with self._lock:
                if not kept.is_away:
                    return kept.value
                form = kept.form
                assert form is not None
                coming = self._coming.get(id(form))
                if coming is None:
                    mine = self._coming[id(form)] = Future()
            if coming is not None:
                coming.exception()  # waits; the other thread raises the error
                continue
            try:
                self._bring_form(form, device or form.home, wait=wait)
            finally:
                with self._lock:
                    del self._coming[id(form)]
                mine.set_result(None)

    def _bring_form(self, form: HostForm, device: Device, *, wait: bool) -> None:
        self.make_room(device, form.nbytes, wait=wait)
        try:
            begun = perf_counter()
            values, stamp = self._allocated(form, device)
            self._around.copied(device, form.nbytes, perf_counter() - begun, back=True)
            back = []
            with self._lock:
                self._settle()
                for ref in form.members:
                    kept = ref()
                    if kept is None or kept.form is not form or not kept.is_away:
                        continue
                    value = values[kept.index]
                    places = nbytes_by_device(value)
                    self._count_away(kept, -1)
                    self._around.brought(kept.key, places, stamp)  # before a task can see the value
                    kept.value, kept.places, kept.after = value, places, stamp
                    kept.memories = self._memories(value, places)
                    self._add(kept)
                    if not _stays_right(values):
                        kept.form = None
                    back.append(kept)
                ledger = self._ledgers.get(device)
                if ledger is not None:
                    ledger.unspills += len(back)
                    ledger.unspilled_nbytes += form.nbytes
        finally:
            self.give_room(device, form.nbytes)
        for kept in back:
            self._around.moved(kept)

    def _allocated(self, form: HostForm, device: Device) -> tuple[tuple[Any, ...], Stamp]:
        for attempt in itertools.count():
            try:
                return form.on_device(device)
            except Exception as error:
                if not is_out_of_memory(error) or attempt == 2:
                    raise
            self._around.drop_copies(device, form.nbytes)
            release_held()
            if attempt:
                self.spill_all(device)
            with suppress(DevctxError), device:
                release_library_caches()
        raise AssertionError

    def __repr__(self) -> str:
        return f"<DeviceMemory of {', '.join(map(str, self._ledgers))}>"


def _stays_right(values: tuple[Any, ...]) -> bool:
    """Return whether the host form of values is kept while they are on the device again.

    Plain arrays are not written to: dask's tasks share them. An object, such as a module, may be.
    """
    (value,) = values if len(values) == 1 else (None,)
    if value is None or walk.find(type(value)) is not walk.LEAF:
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "cudf")
