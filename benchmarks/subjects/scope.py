"""The cost of one ``with device:``, which makes a GPU current and then restores the state before.

Each contender has a thread of its own in each case. The thread is put into the case's state before
every turn. One ``with`` block of each peer is checked: a peer that does not restore the thread's
state does less than the whole job, and does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from benchmarks import field
from benchmarks.case import CannotRunError, Case, Contender, Size
from benchmarks.subjects import scope_contenders as contenders
from benchmarks.subjects.scope_contenders import Way
from dask_devctx import Device, devices, driver
from dask_devctx.errors import DevctxError

TITLE = "the device scope"
TARGET = 0.45


def cases(size: Size) -> Iterator[Case]:
    try:
        gpus = devices()
        for gpu in gpus[:2]:
            with gpu:
                pass  # retains its primary context, which all contenders use
    except DevctxError as error:
        raise CannotRunError(str(error)) from error
    if not gpus:
        raise CannotRunError("CUDA shows this process no device")
    target = gpus[min(1, len(gpus) - 1)]
    judged = not driver.backend().simulated  # a simulated driver takes most of the time itself
    states: list[tuple[str, Device | None]] = [
        ("the same device is current", target),
        ("nothing is current", None),
    ]
    if target.device_id:
        states.insert(1, ("another device is current", gpus[0]))
    ways, missing = contenders.ways(target, gpus[:2])
    for made_each_time in (False, True):
        for name, before in states:
            kind = "made in each with" if made_each_time else "made before"
            if made_each_time and before is not gpus[0]:
                continue  # the states are compared above; this compares the making
            with ExitStack() as stack:
                yield Case(
                    name=f"{name}, the object {kind}{field.where()}",
                    per="with",
                    target=TARGET if judged and not made_each_time else None,
                    contenders=[
                        _contender(way, before, made_each_time, gpus, stack)
                        for way in ways
                        if way.loop(made_each_time) is not None
                    ],
                    missing=missing,
                )


def _contender(
    way: Way,
    before: Device | None,
    made_each_time: bool,
    gpus: tuple[Device, ...],
    stack: ExitStack,
) -> Contender:
    thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=way.name))
    loop = way.loop(made_each_time)
    assert loop is not None
    number = None if before is None else before.device_id

    def look() -> str:
        way.make_current(number)
        loop(1)
        return _name(way.current(), way)

    def run(count: int) -> float:
        def turn() -> float:
            way.make_current(number)
            return loop(count)

        return thread.submit(turn).result()

    after, wanted = thread.submit(look).result(), "nothing" if number is None else f"cuda:{number}"
    restores = after == wanted
    remark = (
        ""
        if not way.switches
        else "restores"
        if restores
        else f"does NOT restore: {wanted} before, {after} after"
    )
    return Contender(
        way.name,
        run,
        way.role,
        counts=restores and way.switches,
        remark="; ".join(filter(None, [remark, way.remark])),
    )


def _name(handle: int, way: Way) -> str:
    if not handle:
        return "nothing"
    return next(
        (f"cuda:{number}" for number, known in way.handles.items() if known == handle),
        f"0x{handle:x}",
    )
