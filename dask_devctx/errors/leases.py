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
        free, total = [_name(device) for device in self.free], len(self.free) + len(self.holders)
        who = "this cluster" if self.by_cluster else "this worker"
        wants = f"{who} wants {counted(self.wanted, 'device') if self.wanted else 'devices'}"
        if self.wanted > total:
            return f"{wants} for itself and there {_are(total)} {total}. Lower devices_per_worker"
        others = "No device is free. Close"
        if free:
            ids = ", ".join(name.rpartition(":")[2] for name in free)
            others = (
                f"Free: {', '.join(free)}. For these, write devices=[{ids}], lower n_workers or "
                "devices_per_worker, or leave them out. Or close"
            )
        held = held_text({_name(device): holder for device, holder in self.holders.items()})
        return (
            f"{wants} for itself, and {held}. {others} the cluster that holds devices and is not "
            f"needed, such as that of a notebook's earlier cell (cluster.close(), or "
            "client.shutdown()), or use the same devices: shared=True"
        )


def _name(device: str) -> str:
    return device.partition(" ")[0]


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
