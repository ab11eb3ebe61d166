"""Values that workers hand over as those of two machines do: none by CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Size
from benchmarks.host import Entry, started
from benchmarks.subjects.transfer import MODULE, named, several, task_case

TITLE = "between machines"


def cases(size: Size) -> Iterator[Case]:
    n_devices = 2
    field.n_devices(at_least=n_devices)
    library = field.library()

    def ours(name: str, role: str, **options: Any) -> Entry:
        given = (library, n_devices, n_devices, "auto", {"ipc": False, **options})
        return Entry(f"dask_devctx, {name}", f"{MODULE}:ours", given, {"role": role})

    host = Entry("NumPy, plain dask", f"{MODULE}:plain", ("numpy", n_devices), {"role": "floor"})
    entries, missing = [ours("host memory", "ours"), host], []
    if (absent := field.lacking("dask_devctx, UCX", *field.UCXX_NEEDS)) is not None:
        missing.append(absent)
    else:
        entries.append(ours("UCX", "variant", protocol="ucxx"))
    peers, others = field.dask_cuda(MODULE, n_devices)
    entries += [peer for peer in peers if peer.name == field.TCP]  # UCXX uses CUDA IPC here
    with started(entries) as (hosts, failed):
        if not hosts or hosts[0][0] is not entries[0]:
            raise CannotRunError(failed[0].reason)
        for nbytes in (2**10, 2**16) if size.tiny else (2**10, 2**26, 2**30):
            name = f"a task with an input of {named(nbytes)} of another worker, without CUDA IPC"
            contenders = [
                entry.contender(several(host, "round_trip", nbytes)) for entry, host in hosts
            ]
            yield task_case(name, 15, contenders, [*missing, *others, *failed], size)
