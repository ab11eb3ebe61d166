"""The tasks on each device of a worker: counts for its metrics, and rows for its history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any, Final

from dask.utils import key_split

from dask_devctx import driver
from dask_devctx.cuda import discovery
from dask_devctx.cuda.device import Device
from dask_devctx.errors import DevctxError
from dask_devctx.scheduler.rows import LONGEST_TEXT, DeviceCounts, memory_field
from dask_devctx.worker.metrics.history import History
from dask_devctx.worker.placement.admission import Admission

# How long NVML's answer about other processes is used: it takes longer than the others.
_PROCESSES_AGE_S: Final = 5.0
REFUSED: Final = "refused"  # an incident: a task got no device
_SHOWN: Final = 4  # the most kinds of running tasks that a row names


class Record:
    """Records, on the worker's event loop, which tasks ran on each device of the worker."""

    def __init__(
        self,
        admission: Admission,
        history: History,
        counts: Callable[[Device], Mapping[str, int | None]],
    ) -> None:
        self.without_device = 0  # tasks that ended and ran on no device
        self._counts = counts  # more counts of a device: `"held"` is the field `memory_held`
        self._admission = admission
        self._history = history
        self._asked_at = float("-inf")  # when NVML was asked for the memory of other processes
        self._of_device = {
            one: asdict(DeviceCounts(one.device_id, one.uuid, one.name)) for one in admission.states
        }
        self._ids = {device: (device.uuid, device.device_id) for device in admission.states}

    def refused(self, ts: Any, error: Exception) -> None:
        """Note a task that got no device and fails with this error."""
        notes = () if isinstance(error, DevctxError) else getattr(error, "__notes__", ())
        reason = ". ".join([f"{type(error).__name__}: {error}", *notes])
        self._history.happened(REFUSED, key=ts.key, text=reason)

    def ended(
        self,
        ts: Any,
        devices: Sequence[Device],
        state: str,
        start: float | None,
        stop: float | None,
        waited: tuple[float, float, float, int | None] = (0.0, 0.0, 0.0, None),
        text: str = "",
    ) -> None:
        """Remember a task that is done or failed, with no devices or with some."""
        failed = state == "error"
        uuid, device_id = self._ids[devices[0]] if devices else (None, None)
        if devices:
            counts = self._of_device[devices[0]]
            counts["slot_s"] += waited[0]
            counts["inputs_s"] += waited[1]
            counts["memory_s"] += waited[2]
            for device in devices:
                self._of_device[device]["failed" if failed else "done"] += 1
        else:
            self.without_device += 1
        if failed:
            self._history.happened("error", uuid, ts.key, text[:LONGEST_TEXT])
        key, prefix, rows = ts.key, ts.prefix, self._history.tasks
        rows.append((key, prefix, uuid, device_id, start, stop, state, *waited))
        for nth, one in enumerate(devices[1:], 1):
            rows.append((key, prefix, *self._ids[one], start, stop, state, *waited, nth))

    def report(self) -> dict[str, Any]:
        """Return the latest tasks, the devices' counts and the refusals, as plain data."""
        incidents = self._history.incidents.since(0)[0]
        return {
            "runs": self._history.tasks.since(0)[0],
            "devices": self.rows(),
            "refused": [
                (key, key_split(key), why) for what, *_, key, why in incidents if what == REFUSED
            ],
            "without_device": self.without_device,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each device: the fields of ``DeviceCounts``, as plain data."""
        backend, now = driver.backend(), monotonic()
        if now - self._asked_at > _PROCESSES_AGE_S:
            self._asked_at = now
            for device, counts in self._of_device.items():
                counts["memory_others"] = discovery.memory_of_others(backend, device.info)
        return [self._row(device, now) for device in self._of_device]

    def _row(self, device: Device, now: float) -> dict[str, Any]:
        backend, state, info = driver.backend(), self._admission.states[device], device.info
        free, total = discovery.memory_info(backend, info) or (None, None)
        utilization, bandwidth = discovery.utilization(backend, info) or (None, None)
        power_w, temperature = discovery.power_and_temperature(backend, info)
        # An entry may come or go on another thread meanwhile.
        running = (claim.prefix for claim in tuple(state.holding))
        queued = min(self._admission.waiting_for(device), state.tasks)
        row = {
            **self._of_device[device],
            "busy_s": state.used_s,
            "occupied_s": state.occupied_s + (now - state.since if state.tasks else 0.0),
            "queued": queued,
            "running": state.tasks - queued,
            "memory_free": free,
            "memory_total": total,
            "utilization": utilization,
            "bandwidth": bandwidth,
            "power_w": power_w,
            "temperature": temperature,
            "tasks_now": tuple(dict.fromkeys(running))[:_SHOWN],
        }
        more = self._counts(device).items()
        return row | {name if name in row else memory_field(name): n for name, n in more}

    def metrics(self, worker: object) -> list[dict[str, Any]]:
        """Return the heartbeat's rows, one for each device; they are samples of the history too."""
        rows, now = self.rows(), self._history.now()
        for row in rows:
            counts = map(row.__getitem__, DeviceCounts.__slots__)
            self._history.samples.append((*counts, now))
        return rows
