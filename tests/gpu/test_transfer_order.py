"""On two real GPUs: a copy waits for its source's work, and its source outlives it.

Each test says what it would catch: the same scene with that part of the ordering left out must
give wrong values, or the scene proves nothing.
"""

from __future__ import annotations

import importlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import dask
import pytest
from distributed import Client, wait

from dask_devctx import Device, LocalDeviceCluster
from dask_devctx.transfer import release_held, stamp
from dask_devctx.transfer.move import Move
from dask_devctx.transfer.traffic import connect

pytestmark = [
    pytest.mark.gpu(count=2),
    pytest.mark.usefixtures("two_gpus"),
    pytest.mark.timeout(600),
]

REPEATS = 200
ELEMENTS = 1 << 20
SPIN = 4_000_000  # cycles: some two milliseconds
GOOD, BAD = 7.0, -1.0


class CuPy:
    """What the scenes need of a library."""

    def __init__(self):
        self.cupy = importlib.import_module("cupy")
        self._spin = self.cupy.RawKernel(
            'extern "C" __global__ void spin(long long n)'
            "{ long long t = clock64(); while (clock64() - t < n) {} }",
            "spin",
        )

    def stream(self, kind, device):
        stream = self.cupy.cuda.Stream
        with Device(device):
            match kind:
                case "legacy":
                    return stream.null
                case "per-thread":
                    return stream.ptds
            return stream(non_blocking=kind == "non-blocking")

    def empty(self):
        return self.cupy.empty(ELEMENTS, "f4")

    def spin(self):
        self._spin((1,), (1,), (SPIN,))

    def differs(self, array, value):
        return bool((array != value).any())

    @staticmethod
    def differs_on_the_host(array, value):
        return bool((array.get() != value).any())


@pytest.fixture
def library():
    pytest.importorskip("cupy")
    made = CuPy()
    yield made
    made.cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(params=["legacy", "per-thread", "blocking", "non-blocking"])
def scene(request, library):
    return Scene(library, request.param)


class Scene:
    """A producer on its own thread and GPU 0, and a mover on this thread for GPU 1."""

    def __init__(self, library, kind):
        self.library = library
        self.kind = kind
        self.streams = [library.stream(kind, device) for device in (0, 1)]

    @contextmanager
    def on(self, device):
        with Device(device), self.streams[device]:
            yield

    def settle(self):
        for device in (0, 1):
            Device(device).sync()
        release_held()

    def make(self, *, slowly=False):
        """GOOD on GPU 0; slowly: its memory says BAD until the GPU has got that far."""
        library = self.library
        with self.on(0):
            array = library.empty()
            array.fill(BAD if slowly else GOOD)
            Device(0).sync()
            if slowly:
                library.spin()
                array.fill(GOOD)
        return array

    def is_wrong(self, moved):
        with self.on(1):
            return self.library.differs(moved, GOOD)


def count_wrong(once, *, until_first=False):
    wrong = 0
    for _ in range(REPEATS):
        wrong += once()
        if wrong and until_first:
            break
    return wrong


class MoveAtOnce(Move):
    def order(self, source, *, on_source=False):  # waits for no work
        connect(self.device, source)


class MoveAndLetGo(Move):
    def keep(self, value):
        pass


@pytest.mark.parametrize("stamped", [True, False])
def test_the_copy_waits_for_the_work_that_makes_its_source(scene, stamped):
    if not stamped and scene.kind == "non-blocking":
        pytest.skip("only the thread that gave it the work knows a non-blocking stream")

    def produce():
        with scene.on(0):
            array = scene.make(slowly=True)
            return array, stamp(array) if stamped else None

    def once(kind=Move):
        scene.settle()
        array, made = producer.submit(produce).result()
        with scene.on(1):
            moved = kind(Device(1), made, guard_source=False).run(array)
        return scene.is_wrong(moved)

    with ThreadPoolExecutor(1) as producer:
        assert count_wrong(once) == 0
        assert count_wrong(lambda: once(MoveAtOnce), until_first=True), (
            "left out, the event is not missed: this scene proves nothing"
        )


def test_a_source_that_is_freed_and_overwritten_at_once_was_read(scene):
    library = scene.library
    reused = 0  # memory may be used again as soon as the copy is done

    def once(kind=Move, spins=1):
        nonlocal reused
        scene.settle()
        array = scene.make()
        address = array.data.ptr
        with scene.on(1):
            for _ in range(spins):
                library.spin()  # the copy is behind this
            moved = kind(Device(1), guard_source=False).run(array)
        del array
        with scene.on(0):
            other = library.empty()
            reused += other.data.ptr == address
            other.fill(BAD)
        return scene.is_wrong(moved)

    assert count_wrong(once) == 0
    # A busy host may come too late to overwrite it: the copy waits longer each time.
    spins = itertools.cycle(2**n for n in range(9))
    wrong = count_wrong(lambda: once(MoveAndLetGo, next(spins)), until_first=True)
    assert reused, "the library did not use the memory again: this scene proves nothing"
    assert wrong, "left out, holding the source is not missed: this scene proves nothing"


def test_a_source_that_is_written_to_at_once_was_read(scene):
    library = scene.library

    def once(guard_source=True, spins=1):
        scene.settle()
        array = scene.make()
        with scene.on(0), scene.on(1):
            for _ in range(spins):
                library.spin()  # the copy is behind this
            moved = Move(Device(1), guard_source=guard_source).run(array)
        with scene.on(0):
            array.fill(BAD)
        return scene.is_wrong(moved)

    assert count_wrong(once) == 0
    spins = itertools.cycle(2**n for n in range(9))  # as above
    assert count_wrong(lambda: once(False, next(spins)), until_first=True), (
        "left out, the event back is not missed: this scene proves nothing"
    )


_scenes: dict[str, Scene] = {}  # for tasks, which run in this process


def _make_slowly(name):
    scene = _scenes[name]
    library = scene.library
    with scene.on(0):
        array = library.empty()
        array.fill(BAD)
        scene.settle()
        for _ in range(50):  # longer than it takes dask to ask for the result
            library.spin()
        array.fill(GOOD)
    scene.streams[0].use()
    return array


@pytest.mark.parametrize("reader", ["client", "task without a device"])
def test_what_is_read_elsewhere_is_read_after_the_work_that_makes_it(library, reader):
    """From a stream for which the default ones do not wait by themselves."""
    _scenes["here"] = Scene(library, "non-blocking")

    def wrong(client):
        with dask.annotate(device=0):
            made = client.submit(_make_slowly, "here", pure=False)
        wait(made)
        if reader == "task without a device":
            with dask.annotate(device="none"):
                task = client.submit(library.differs_on_the_host, made, GOOD, pure=False)
            return task.result()
        return library.differs(made.result(), GOOD)

    def count(**options):
        with (
            LocalDeviceCluster(
                processes=False,
                protocol="tcp",
                dashboard_address=":0",
                memory_limit="64GiB",
                devices=[0],
                device_memory_limit=0,
                **options,
            ) as cluster,
            Client(cluster) as client,
        ):
            return sum(wrong(client) for _ in range(10))

    try:
        assert count() == 0
        assert count(move_inputs=False), (
            "left out, the wait is not missed: this scene proves nothing"
        )
    finally:
        _scenes.clear()
