"""Memory that processes share, on both drivers.

Statuses with a comment "measured" were measured on H200s with driver 580. The others are those of
CUDA's documentation.
"""

# ruff: noqa: F821 - the functions run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import inspect
import os

import pytest

from tests.device_memory import read, write


def calls_of(kind, ordinal=0):
    """A driver's calls, with a device's primary context current."""
    from dask_devctx.driver.calls import Calls

    calls = Calls(make(kind))
    calls.init()
    calls.set_current(calls.primary_retain(ordinal))
    return calls


def refusal(call, *arguments):
    from dask_devctx.errors import DriverError

    try:
        call(*arguments)
    except DriverError as error:
        return error.status.removeprefix("CUDA_ERROR_")
    return "SUCCESS"


def exporter(kind, offset=0):
    """Export memory, then follow the requests on standard input."""
    calls = calls_of(kind)
    pointer = calls.work.allocate(4 * 2**20)
    write(calls.work, pointer, b"exported")
    print(calls.work.ipc_export(pointer + offset).hex(), flush=True)
    for line in sys.stdin:
        if line == "read\n":
            print(read(calls.work, pointer, 8).hex(), flush=True)
        if line == "free\n":
            calls.work.free(pointer)
            print("freed", flush=True)
        if line == "replace\n":
            calls.work.free(pointer)
            pointer = calls.work.allocate(4 * 2**20)
            print(calls.work.ipc_export(pointer).hex(), flush=True)
        if line == "export\n":
            print(calls.work.ipc_export(pointer).hex(), flush=True)


class Peer:
    """An exporting process."""

    def __init__(self, kind, *arguments):
        self.process = start(exporter, kind, *arguments)
        self.handle = bytes.fromhex(self.process.stdout.readline())

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()


def both_see_one_memory(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        pointer = calls.work.ipc_open(peer.handle)
        assert read(calls.work, pointer, 8) == b"exported"
        write(calls.work, pointer, b"imported")
        calls.synchronize()
        assert bytes.fromhex(peer.ask("read")) == b"imported"
        calls.work.ipc_close(pointer)
        assert refusal(read, calls.work, pointer, 8) == "INVALID_VALUE"
        assert bytes.fromhex(peer.ask("read")) == b"imported"  # closing changes nothing there


def another_device_copies_it(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        if calls.device_count() < 2 or not calls.can_access_peer(1, 0):
            print("skip: no two devices that reach each other")
            return
        calls = calls_of(kind, 1)
        target, stream = calls.work.allocate(4 * 2**20), calls.work.stream_create()
        pointer = calls.work.ipc_open(peer.handle)
        calls.work.copy(target, pointer, 4 * 2**20, stream)
        calls.work.stream_synchronize(stream)
        assert read(calls.work, target, 8) == b"exported"
        calls.work.ipc_close(pointer)


def a_handle_is_of_the_whole_allocation(kind):
    with Peer(kind, 2 * 2**20 + 16) as peer:
        calls = calls_of(kind)
        pointer = calls.work.ipc_open(peer.handle)
        assert read(calls.work, pointer, 8) == b"exported"
        calls.work.ipc_close(pointer)


def exported_twice_it_is_one(kind):
    with Peer(kind) as peer:
        again = bytes.fromhex(peer.ask("export"))
        calls = calls_of(kind)
        pointer = calls.work.ipc_open(peer.handle)
        assert calls.work.ipc_open(again) == pointer
        assert refusal(calls.work.free, pointer) == "INVALID_VALUE"
        assert refusal(calls.work.ipc_export, pointer) == "INVALID_VALUE"
        calls.work.ipc_close(pointer)
        assert read(calls.work, pointer, 8) == b"exported"  # open as often as it was opened
        calls.work.ipc_close(pointer)
        assert refusal(calls.work.ipc_close, pointer) == "INVALID_VALUE"


def what_is_refused_without_another_process(kind):
    # https://github.com/openucx/ucx/pull/11603: "invalid device context"
    calls = calls_of(kind)
    pointer = calls.work.allocate(4 * 2**20)
    assert refusal(calls.work.ipc_open, calls.work.ipc_export(pointer)) == "INVALID_CONTEXT"
    write(calls.work, pointer, b"works on")
    assert refusal(calls.work.ipc_close, pointer) == "INVALID_VALUE"
    assert refusal(calls.work.ipc_open, bytes(64)) == "INVALID_VALUE"


def a_freed_export(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        assert peer.ask("free") == "freed"
        assert refusal(calls.work.ipc_open, peer.handle) == "INVALID_VALUE"  # measured
        calls.synchronize()


def an_exporter_that_is_killed_while_it_is_read(kind):
    # measured: the importer's copies succeed, and closing works
    with Peer(kind) as peer:
        calls = calls_of(kind)
        pointer, target = calls.work.ipc_open(peer.handle), calls.work.allocate(4 * 2**20)
        for number in range(40):
            if number == 20:
                peer.process.kill()
                peer.process.wait()
            calls.work.copy(target, pointer, 4 * 2**20, 0)
        calls.synchronize()
        assert read(calls.work, target, 8) == b"exported"
        calls.work.ipc_close(pointer)
        calls.synchronize()


def opened_memory_goes_with_its_context(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        own = calls.create(0, 0)
        pointer = calls.work.ipc_open(peer.handle)
        calls.destroy(own)
        calls.set_current(calls.primary_retain(0))
        assert refusal(read, calls.work, pointer, 8) == "INVALID_VALUE"
        assert bytes.fromhex(peer.ask("read")) == b"exported"


def clauses():
    """The functions of this module so far that take a kind of driver and nothing else."""
    functions = filter(inspect.isfunction, list(globals().values()))
    return [f for f in functions if [*inspect.signature(f).parameters] == ["kind"]]


CONTRACT = clauses()
BESIDE = (calls_of, refusal, exporter, Peer, read, write)


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(clause, kind, child):
    done = child(clause, kind, env={"CUDA_VISIBLE_DEVICES": None}, beside=BESIDE)
    if done.stdout.startswith("skip: "):
        pytest.skip(done.stdout)


# -- situations that a machine's GPUs may lack


def of_another_machine(kind):
    with Peer(kind) as peer:
        machine = make_machine(host="another")
        assert refusal(machine.work.ipc_open, peer.handle) == "INVALID_VALUE"


def between_devices_that_do_not_reach_each_other(kind):
    with Peer(kind) as peer:
        machine = make_machine(peers=frozenset())
        assert refusal(machine.work.ipc_open, peer.handle) == "SUCCESS"  # the same device
        machine.set_current(machine.primary_retain(1))
        assert refusal(machine.work.ipc_open, peer.handle) == "PEER_ACCESS_UNSUPPORTED"


def an_instance(kind):
    # "CUDA IPC across GPU instances is not supported" (NVIDIA MIG User Guide)
    with Peer(kind) as peer:
        instances = ("MIG-00000000-0000-0000-0000-000000000001",)
        machine = make_machine(mig=instances)
        assert refusal(machine.work.ipc_export, machine.work.allocate(8)) == "NOT_SUPPORTED"
        assert refusal(machine.work.ipc_open, peer.handle) == "NOT_SUPPORTED"


def an_export_of_whose_place_another_one_took(kind):
    with Peer(kind) as peer:
        calls = make_machine()
        old = calls.work.ipc_open(peer.handle)
        new = bytes.fromhex(peer.ask("replace"))  # the new memory has the same file descriptor
        assert refusal(calls.work.ipc_open, new) == "SUCCESS"
        calls.work.ipc_close(old)
        assert refusal(calls.work.ipc_open, peer.handle) == "INVALID_VALUE"


def a_freed_export_that_is_still_read(kind):
    # "undefined behavior": here none of the old bytes remain
    with Peer(kind) as peer:
        calls = make_machine()
        pointer = calls.work.ipc_open(peer.handle)
        peer.ask("free")
        assert read(calls.work, pointer, 8) != b"exported"


def freed_memory_leaves_no_open_file(kind):
    machine = make_machine()
    before = len(os.listdir("/proc/self/fd"))
    pointers = [machine.work.allocate(4096) for _ in range(3)]
    for pointer in pointers:
        write(machine.work, pointer, b"some")
        machine.work.ipc_export(pointer)
    own = machine.create(0, 0)
    write(machine.work, machine.work.allocate(4096), b"some")
    assert len(os.listdir("/proc/self/fd")) > before
    machine.destroy(own)
    for pointer in pointers:
        machine.work.free(pointer)
    assert len(os.listdir("/proc/self/fd")) == before


def make_machine(host="test", peers=None, mig=None):
    """The calls of a simulated machine, with the first device's primary context current."""
    from dask_devctx.driver.calls import Calls
    from dask_devctx.driver.simulated import SimulatedMachine

    machine = SimulatedMachine(2, host=host)
    for gpu in machine.gpus:
        gpu.peers = peers
    machine.gpus[0].mig = mig
    if mig:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    calls = Calls(machine.driver)
    calls.machine = machine
    calls.init()
    calls.set_current(calls.primary_retain(0))
    return calls


@pytest.mark.parametrize(
    "clause",
    [clause for clause in clauses() if clause not in CONTRACT],
    ids=lambda clause: clause.__name__,
)
def test_simulated(clause, child):
    assert hasattr(os, "memfd_create")
    child(clause, "simulated", beside=(*BESIDE, make_machine))
