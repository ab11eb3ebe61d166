"""The lanes of the plots: one for each device, grouped by host, and one for other work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# The space between two hosts, as a part of a lane's height.
HOST_PADDING: Final = 0.6
# The label of the lane for tasks without a device.
NO_DEVICE: Final = "no device"


@dataclass(frozen=True, slots=True)
class Member:
    """A device of a worker.

    Parameters
    ----------
    host
        The worker's host.
    worker_name
        The worker's name, which tells two devices with the same ordinal apart.
    uuid
        The device's UUID; None for the tasks without a device.
    device_id
        The device's ordinal in the worker's process; None for the tasks without a device.
    """

    host: str
    worker_name: str
    uuid: str | None
    device_id: int | None


class Lanes:
    """The positions of lanes on an axis with the labels ``factors``.

    Parameters
    ----------
    members
        The devices of all workers. A device that several workers use has one lane, and so do the
        tasks without a device of one host.

    Attributes
    ----------
    factors
        The labels as Bokeh's ``FactorRange`` takes them, from the bottom to the top. With several
        hosts, a label is the pair of the host and the device.
    positions, labels
        The middle of each lane and its name, with the host if there are several, by host and UUID.

    Examples
    --------
    >>> lanes = Lanes(Member("node-1", "a", f"GPU-{n}", n) for n in range(2))
    >>> lanes.factors
    ['cuda:1', 'cuda:0']
    >>> lanes.position("node-1", "GPU-0"), lanes.label("node-1", "GPU-0")
    (1.5, 'cuda:0')
    """

    def __init__(self, members: Iterable[Member] = ()) -> None:
        labels = _labels(set(members))
        hosts = {host for host, _ in labels}
        self.factors: list[str | tuple[str, str]] = []
        self.positions: dict[tuple[str, str | None], float] = {}
        self.labels: dict[tuple[str, str | None], str] = {}
        position, last = 0.5, None
        for place, label in reversed(labels.items()):
            host = place[0]
            if last not in (None, host):
                position += HOST_PADDING
            last = host
            self.positions[place] = position
            self.labels[place] = f"{host} {label}" if len(hosts) > 1 else label
            self.factors.append((host, label) if len(hosts) > 1 else label)
            position += 1

    def position(self, host: str, uuid: str | None) -> float | None:
        """Return the middle of a device's lane, or None if it has no lane."""
        return self.positions.get((host, uuid))

    def label(self, host: str, uuid: str | None) -> str:
        """Return the name of a device's lane, with its host if there are several."""
        return self.labels.get((host, uuid), NO_DEVICE if uuid is None else uuid)


def _labels(members: set[Member]) -> dict[tuple[str, str | None], str]:
    """Return the label of each lane, from the top to the bottom."""
    places = {(m.host, m.uuid): m for m in sorted(members, key=_order)}
    shared = Counter((m.host, m.device_id) for m in places.values())
    labels = {}
    for place, member in places.items():
        label = NO_DEVICE if member.uuid is None else f"cuda:{member.device_id}"
        if shared[member.host, member.device_id] > 1:  # each process sees its own device only
            label += f" {member.worker_name}"
        labels[place] = label
    if len(set(zip((host for host, _ in places), labels.values(), strict=True))) < len(places):
        labels = {place: f"{label} {(place[1] or '')[:12]}" for place, label in labels.items()}
    return labels


def _order(member: Member) -> tuple[object, ...]:
    last = member.device_id is None
    return _natural(member.host), last, member.device_id or 0, _natural(member.worker_name)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in a text by their value: node-2 comes before node-10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)
    ]
