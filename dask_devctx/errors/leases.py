"""The exceptions of a worker or cluster that cannot have devices for itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dask_devctx.errors.base import DevctxError, counted


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

    @staticmethod
    def _convert(fields: dict[str, Any]) -> None:
        fields["free"] = tuple(fields["free"])
        fields["holders"] = dict(fields["holders"])

    def __str__(self) -> str:
        if self.by_cluster:
            return self._of_cluster()
        return f"{self._facts()}. {self._remedy()}"

    def _facts(self) -> str:
        total = len(self.free) + len(self.holders)
        wants = f"this worker wants {counted(self.wanted, 'device')} for itself and"
        if self.wanted > total:
            return f"{wants} there {_are(total)} {total}"
        held = held_text(self.holders)
        if not self.wanted:
            return f"this worker wants devices for itself, and none is free: {held}"
        free = f"{len(self.free)} of {total} {_are(len(self.free))} free"
        return f"{wants} {free}{': ' if held else ''}{held}"

    def _remedy(self) -> str:
        if self.wanted > len(self.free) + len(self.holders):
            return "Lower devices_per_worker"
        if not self.wanted:
            return (
                "Close a cluster that holds them and is not needed (cluster.close(), or "
                "client.shutdown()), or start fewer workers on this machine. Workers that are to "
                "use the same devices say so: DevicePlugin(shared=True), --shared (devctx.shared: "
                "true)"
            )
        return (
            "Close a cluster that holds them and is not needed, such as that of a notebook's "
            "earlier cell (cluster.close(), or client.shutdown()), start fewer workers on this "
            "machine, or lower devices_per_worker"
        )

    def _of_cluster(self) -> str:
        free = [device.partition(" ")[0] for device in self.free]
        numbers = ", ".join(name.rpartition(":")[2] for name in free)
        held = {device.partition(" ")[0]: who for device, who in self.holders.items()}
        others = "No device is free. Close"
        if free:
            others = (
                f"Free: {', '.join(free)}. For these, write devices=[{numbers}], or leave devices "
                "and n_workers out. Or close"
            )
        return (
            f"this cluster wants {counted(self.wanted, 'device')} for itself, and "
            f"{held_text(held)}. {others} the cluster that holds devices and is "
            "not needed, such as that of a notebook's earlier cell (cluster.close(), or "
            "client.shutdown()), or use the same devices: shared=True"
        )


# The note of a worker in its lock.
_HOLDER = re.compile(
    r"pid (?P<pid>\d+) on (?P<host>\S+), worker (?P<worker>.+) of (?P<cluster>[^,]+)"
)


def held_text(holders: Mapping[str, str]) -> str:
    """Return a text about the holders of devices, each cluster named once.

    Parameters
    ----------
    holders
        The holder of each device, by the device's description.
    """
    of_clusters: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    of_others: dict[str, list[str]] = {}
    for device, who in holders.items():
        if found := _HOLDER.fullmatch(who):
            place = of_clusters.setdefault((found["cluster"], found["host"]), {})
            place[device] = found["worker"], found["pid"]
        else:
            of_others.setdefault(who, []).append(device)
    texts = []
    for (cluster, host), place in of_clusters.items():
        workers, pids = (list(dict.fromkeys(each)) for each in zip(*place.values(), strict=True))
        who = f"{_listed('worker', workers)} of {cluster} ({_listed('pid', pids)} on {host})"
        texts.append(f"{', '.join(place)} {_are(len(place))} held by {who}")
    for who, names in of_others.items():
        texts.append(f"{', '.join(names)} {_are(len(names))} held by {who}")
    return "; ".join(texts)


def _listed(noun: str, items: Sequence[str]) -> str:
    return f"{noun if len(items) == 1 else noun + 's'} {', '.join(items)}"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"
