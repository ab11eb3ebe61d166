"""Tasks that hold all places of a device while they wait for others: said once, and how to mend."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask
import pytest
from distributed import (
    Client,
    Event,
    LocalCluster,
    Lock,
    Queue,
    Semaphore,
    Variable,
    get_client,
    secede,
    worker_client,
)

from dask_devctx import DevicePlugin, LocalDeviceCluster, report
from dask_devctx.worker.placement import standstill

LOGGER = "distributed.worker.dask_devctx"


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_LOOK_INTERVAL_S", 0.1)
    monkeypatch.setattr(standstill, "_PATIENCE_S", 0.5)


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalDeviceCluster(
            processes=False, devices=[1], tasks_per_device=4, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def event_set(name: str) -> None:
    Event(name).wait()


def result_of_another(name: str) -> int:
    return get_client().submit(lambda: 1, key=f"{name}-inner").result()


def lock_free(name: str) -> None:
    Lock(name).acquire()


def queue_filled(name: str) -> Any:
    return Queue(name).get()


def variable_set(name: str) -> Any:
    return Variable(name).get()


def semaphore_free(name: str) -> None:
    Semaphore(max_leases=1, name=name).acquire()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "All places of" in r.getMessage()]


def wait_for(done: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_four_tasks_that_wait_for_a_fifth(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    held = Semaphore(max_leases=1, name="waits-4")
    assert held.acquire()
    with caplog.at_level(logging.WARNING, LOGGER):
        waits = [
            client.submit(function, f"waits-{number}", key=f"waits-{number}", priority=9)
            for number, function in enumerate(
                (event_set, result_of_another, queue_filled, semaphore_free), 1
            )
        ]
        fifth = client.submit(lambda: Event("waits-1").set(), key="fifth")
        wait_for(lambda: said(caplog))
        time.sleep(0.5)
        (line,) = said(caplog)
        for part in (
            "cuda:1",
            "'waits-1' in Event.wait",
            "'waits-2' in Future.result",
            "'waits-3' in Queue.get",
            "'waits-4' in Semaphore.acquire",
            "2 tasks wait for a place there",
            "distributed.secede()",
            "worker_client()",
            "dask.annotate(device=None)",
            "tasks_per_device",
            "more workers",
        ):
            assert part in line
        found = report(client)
        assert [*found.waiting.values()] == [line]
        assert "standstill of" in str(found)
        assert any(line == e.get("message") for _, e in client.get_events("devctx"))
        held.release()  # one of them goes on, and so do all
        Queue("waits-3").put(3)
        client.gather([fifth, *waits])
        wait_for(lambda: not report(client).waiting)
        assert said(caplog) == [line]


@pytest.mark.parametrize(("function", "call"), [(lock_free, "Lock"), (variable_set, "Variable")])
def test_other_calls(
    client: Client, caplog: pytest.LogCaptureFixture, function: Any, call: str
) -> None:
    lock = Lock("waits")
    lock.acquire()
    with caplog.at_level(logging.WARNING, LOGGER):
        first = client.submit(function, "waits", pure=False)
        others = client.map(event_set, ["go"] * 4, pure=False)
        wait_for(lambda: said(caplog))
        assert f"in {call}." in said(caplog)[0]
        Event("go").set()
        lock.release()
        Variable("waits").set(1)
        client.gather([first, *others])


def test_tasks_that_dask_holds_back(caplog: pytest.LogCaptureFixture) -> None:
    """A worker with as few threads as places gets no task that waits for a place."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=4, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
        caplog.at_level(logging.WARNING, LOGGER),
    ):
        client.register_plugin(DevicePlugin())
        futures = client.map(event_set, ["few threads"] * 4, pure=False, priority=1)
        fifth = client.submit(lambda: Event("few threads").set())
        wait_for(lambda: said(caplog))
        assert "cuda:0, cuda:1, cuda:2, cuda:3" in said(caplog)[0]
        assert "1 task waits for a place" in said(caplog)[0]
        Event("few threads").set()
        client.gather([fifth, *futures])


class Holder:
    pass


def test_a_task_that_waits_for_the_end_of_an_actor(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        with dask.annotate(device_share=1):
            holder = client.submit(Holder, actor=True, key="the-holder")
        holder.result()
        waits = client.submit(lambda: 1, key="waits")
        wait_for(lambda: report(client).waiting)
        (text,) = report(client).waiting.values()
        for part in (
            "cuda:1 is held by 'the-holder'",
            "1 task waits for it",
            "device_share",
            "No other device may run the tasks: actors hold those too, or workers=",
        ):
            assert part in text
        (device,) = report(client).devices
        assert (device.running, device.queued) == (0, 1)
        assert [r.getMessage() for r in caplog.records if "is held by" in r.getMessage()] == [text]
        del holder
        assert waits.result(timeout=10) == 1
        wait_for(lambda: not report(client).waiting)


def test_tasks_that_name_the_device_of_an_actor(client: Client) -> None:
    with dask.annotate(device=1):
        with dask.annotate(device_share=1):
            holder = client.submit(Holder, actor=True, key="the-holder")
        holder.result()
        waits = client.submit(lambda: 1, key="waits")
    wait_for(lambda: report(client).waiting)
    (text,) = report(client).waiting.values()
    assert "The tasks name their device: without the name, another device runs them" in text
    assert "No other device" not in text
    del holder
    assert waits.result(timeout=10) == 1


def test_more_workers_are_no_remedy_for_a_task_that_names_its_device(client: Client) -> None:
    with dask.annotate(device=1):
        waits = client.map(event_set, ["named"] * 4, pure=False, priority=1)
        fifth = client.submit(lambda: Event("named").set(), key="named-fifth")
    wait_for(lambda: report(client).waiting)
    (text,) = report(client).waiting.values()
    assert "1 task that names its device waits for a place there." in text
    assert "tasks_per_device" in text
    assert "more workers" not in text
    Event("named").set()
    client.gather([fifth, *waits])


def test_a_slow_job_is_none(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    def slow(_: int) -> None:
        time.sleep(0.8)

    def waits_for_a_thread(_: int) -> None:
        threading.Event().wait(0.8)

    with caplog.at_level(logging.WARNING, LOGGER):
        client.gather(client.map(slow, range(8)) + client.map(waits_for_a_thread, range(4)))
        # three wait for the fourth, which computes
        waits = client.map(event_set, ["slow"] * 3, pure=False, priority=1)
        computes = client.submit(lambda: (time.sleep(1), Event("slow").set()), pure=False)
        client.gather([*waits, computes, *client.map(slow, range(8, 12))])
        assert not said(caplog)


def test_tasks_that_give_their_place_to_others_are_none(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def inner(number: int) -> int:
        time.sleep(0.3)
        return number

    def with_a_client(number: int) -> int:
        with worker_client() as own:
            return own.submit(inner, number).result()

    def secedes(number: int) -> int:
        secede()
        return get_client().submit(inner, number + 100).result()

    with caplog.at_level(logging.WARNING, LOGGER):
        futures = client.map(with_a_client, range(8)) + client.map(secedes, range(8))
        assert client.gather(futures) == [*range(8), *range(100, 108)]
        assert not said(caplog)
