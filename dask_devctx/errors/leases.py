"""The exceptions of a worker or cluster that cannot have devices for itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from dask_devctx.errors.base import DevctxError, counted

# The note of a worker in its lock.
_HOLDER: Final = re.compile(
    r"pid (?P<pid>\d+) on (?P<host>\S+), worker (?P<worker>.+) of (?P<cluster>[^,]+)"
)
_CLOSE: Final = "that of a notebook's earlier cell (cluster.close(), or client.shutdown())"


class LockDirectoryError(DevctxError):
    """The directory of the device locks is unsafe, or cannot be used.

    Parameters
    ----------
    path
        The directory, or the file in it.
    reason
        What is wrong with it.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return (
            f"devices cannot be shared out: {self.path} {self.reason}. Remove or repair it, or "
            "name another directory with the configuration devctx.lock-directory"
        )


class DevicesInUseError(DevctxError):
    """A worker, or a cluster that starts, wants more devices for itself than are free.

    Parameters
    ----------
    wanted
        How many devices it wants; 0 for any number of those that are free.
    free
        A description of each free device.
    holders
        The holder of each other device, by the device's description.
    by_cluster
        Whether a cluster on this machine wants them, before it starts its workers.
    """

    wanted: int
    free: Sequence[str]
    holders: Mapping[str, str]
    by_cluster: bool = False

    def __str__(self) -> str:
        return self._of_cluster() if self.by_cluster else self._of_worker()

    def _of_worker(self) -> str:
        held, total = held_text(self.holders), len(self.free) + len(self.holders)
        wants = f"this worker wants {counted(self.wanted, 'device')} for itself and"
        if self.wanted > total:
            return f"{wants} there {_are(total)} {total}. Lower devices_per_worker"
        if not self.wanted:
            return (
                f"this worker wants devices for itself, and none is free: {held}. Close a cluster "
                "that holds them and is not needed (cluster.close(), or client.shutdown()), or "
                "start fewer workers on this machine. Workers that are to use the same devices say "
                "so: DevicePlugin(shared=True), --shared (devctx.shared: true)"
            )
        free = f"{len(self.free)} of {total} {_are(len(self.free))} free"
        return (
            f"{wants} {free}{': ' if held else ''}{held}. Close a cluster that holds them and is "
            f"not needed, such as {_CLOSE}, start fewer workers on this machine, or lower "
            "devices_per_worker"
        )

    def _of_cluster(self) -> str:
        free = [device.partition(" ")[0] for device in self.free]
        held = {device.partition(" ")[0]: who for device, who in self.holders.items()}
        others = "No device is free. Close"
        if free:
            numbers = ", ".join(name.rpartition(":")[2] for name in free)
            others = (
                f"Free: {', '.join(free)}. For these, write devices=[{numbers}], or leave devices "
                "and n_workers out. Or close"
            )
        return (
            f"this cluster wants {counted(self.wanted, 'device')} for itself, and "
            f"{held_text(held)}. {others} the cluster that holds devices and is not needed, such "
            f"as {_CLOSE}, or use the same devices: shared=True"
        )


def held_text(holders: Mapping[str, str]) -> str:
    """Return a text about the holders of devices, by the device; each cluster is named once."""
    groups: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for device, who in holders.items():
        found = _HOLDER.fullmatch(who)
        group: tuple[str, ...] = (found["cluster"], found["host"]) if found else (who,)
        worker, pid = (found["worker"], found["pid"]) if found else ("", "")
        groups.setdefault(group, []).append((device, worker, pid))
    texts = []
    # Clusters first, then holders that are no workers.
    for group in sorted(groups, key=len, reverse=True):
        devices, workers, pids = (
            list(dict.fromkeys(each)) for each in zip(*groups[group], strict=True)
        )
        who = group[0]
        if len(group) > 1:
            who = f"{_named('worker', workers)} of {who} ({_named('pid', pids)} on {group[1]})"
        texts.append(f"{', '.join(devices)} {_are(len(devices))} held by {who}")
    return "; ".join(texts)


def _named(noun: str, names: Sequence[str]) -> str:
    return f"{noun if len(names) == 1 else noun + 's'} {', '.join(names)}"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"
