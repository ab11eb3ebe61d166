"""Memory between processes: what both drivers answer.

The statuses were measured on H200s with driver 580 where a comment says so, and are those of CUDA's
documentation otherwise.
"""

# ruff: noqa: F821 - the functions run elsewhere, where the fixture `child` defines these names

from __future__ import annotations

import os

import pytest


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
    """Export memory, then do what is asked on standard input."""
    calls = calls_of(kind)
    pointer = calls.allocate(4 * 2**20)
    calls.copy_from_host(pointer, b"exported")
    print(calls.ipc_export(pointer + offset).hex(), flush=True)
    for line in sys.stdin:
        if line == "read\n":
            print(calls.copy_to_host(pointer, 8).hex(), flush=True)
        if line == "free\n":
            calls.free(pointer)
            print("freed", flush=True)
        if line == "export\n":
            print(calls.ipc_export(pointer).hex(), flush=True)


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
        pointer = calls.ipc_open(peer.handle)
        assert calls.address_range(pointer) == (pointer, 4 * 2**20)
        assert calls.copy_to_host(pointer, 8) == b"exported"
        calls.copy_from_host(pointer, b"imported")
        calls.synchronize()
        assert bytes.fromhex(peer.ask("read")) == b"imported"
        calls.ipc_close(pointer)
        assert refusal(calls.copy_to_host, pointer, 8) == "INVALID_VALUE"
        assert bytes.fromhex(peer.ask("read")) == b"imported"  # closing changes nothing there


def another_device_copies_it(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        if calls.device_count() < 2 or not calls.can_access_peer(1, 0):
            print("skip: no two devices that reach each other")
            return
        calls = calls_of(kind, 1)
        target, stream = calls.allocate(4 * 2**20), calls.stream_create()
        pointer = calls.ipc_open(peer.handle)
        calls.copy(target, pointer, 4 * 2**20, stream)
        calls.stream_synchronize(stream)
        assert calls.copy_to_host(target, 8) == b"exported"
        calls.ipc_close(pointer)


def a_handle_is_of_the_whole_allocation(kind):
    with Peer(kind, 2 * 2**20 + 16) as peer:
        calls = calls_of(kind)
        pointer = calls.ipc_open(peer.handle)
        assert calls.copy_to_host(pointer, 8) == b"exported"
        calls.ipc_close(pointer)


def exported_twice_it_is_one(kind):
    with Peer(kind) as peer:
        again = bytes.fromhex(peer.ask("export"))
        calls = calls_of(kind)
        pointer = calls.ipc_open(peer.handle)
        assert calls.ipc_open(again) == pointer
        calls.ipc_close(pointer)
        assert calls.copy_to_host(pointer, 8) == b"exported"  # open as often as it was opened
        calls.ipc_close(pointer)
        assert refusal(calls.ipc_close, pointer) == "INVALID_VALUE"


def the_exporter_itself_opens_nothing(kind):
    # https://github.com/openucx/ucx/pull/11603: "invalid device context"
    calls = calls_of(kind)
    pointer = calls.allocate(4 * 2**20)
    assert refusal(calls.ipc_open, calls.ipc_export(pointer)) == "INVALID_CONTEXT"
    calls.copy_from_host(pointer, b"works on")


def a_freed_export(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        assert peer.ask("free") == "freed"
        assert refusal(calls.ipc_open, peer.handle) == "INVALID_VALUE"  # measured
        calls.synchronize()


def an_exporter_that_is_gone(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        peer.process.kill()
        peer.process.wait()
        assert refusal(calls.ipc_open, peer.handle) == "INVALID_VALUE"
        calls.synchronize()


def an_exporter_that_is_killed_while_it_is_read(kind):
    # measured: the importer's copies succeed, and closing works
    with Peer(kind) as peer:
        calls = calls_of(kind)
        pointer, target = calls.ipc_open(peer.handle), calls.allocate(4 * 2**20)
        for number in range(40):
            if number == 20:
                peer.process.kill()
                peer.process.wait()
            calls.copy(target, pointer, 4 * 2**20, 0)
        calls.synchronize()
        assert calls.copy_to_host(target, 8) == b"exported"
        calls.ipc_close(pointer)
        calls.synchronize()


def what_is_no_handle(kind):
    calls = calls_of(kind)
    assert refusal(calls.ipc_open, bytes(64)) == "INVALID_VALUE"


def what_was_opened_is_neither_freed_nor_exported(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        pointer = calls.ipc_open(peer.handle)
        assert refusal(calls.free, pointer) == "INVALID_VALUE"
        assert refusal(calls.ipc_export, pointer) == "INVALID_VALUE"
        calls.ipc_close(pointer)


def what_was_allocated_is_not_closed(kind):
    calls = calls_of(kind)
    assert refusal(calls.ipc_close, calls.allocate(4 * 2**20)) == "INVALID_VALUE"


def one_context_of_a_device_opens_a_processs_memory(kind):
    # "may only be opened by one CUcontext per CUdevice per other process"
    with Peer(kind) as peer:
        calls = calls_of(kind)
        pointer = calls.ipc_open(peer.handle)
        own = calls.create(0, 0)
        assert refusal(calls.ipc_open, peer.handle) == "ALREADY_MAPPED"
        calls.destroy(own)
        calls.set_current(calls.primary_retain(0))
        calls.ipc_close(pointer)


def opened_memory_goes_with_its_context(kind):
    with Peer(kind) as peer:
        calls = calls_of(kind)
        own = calls.create(0, 0)
        pointer = calls.ipc_open(peer.handle)
        calls.destroy(own)
        calls.set_current(calls.primary_retain(0))
        assert refusal(calls.copy_to_host, pointer, 8) == "INVALID_VALUE"
        assert bytes.fromhex(peer.ask("read")) == b"exported"


CONTRACT = [
    both_see_one_memory,
    another_device_copies_it,
    a_handle_is_of_the_whole_allocation,
    exported_twice_it_is_one,
    the_exporter_itself_opens_nothing,
    a_freed_export,
    an_exporter_that_is_gone,
    an_exporter_that_is_killed_while_it_is_read,
    what_is_no_handle,
    what_was_opened_is_neither_freed_nor_exported,
    what_was_allocated_is_not_closed,
    one_context_of_a_device_opens_a_processs_memory,
    opened_memory_goes_with_its_context,
]
BESIDE = (calls_of, refusal, exporter, Peer)


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(clause, kind, child):
    done = child(clause, kind, env={"CUDA_VISIBLE_DEVICES": None}, beside=BESIDE)
    if done.stdout.startswith("skip: "):
        pytest.skip(done.stdout)


# -- what one machine's GPUs need not have


def of_another_machine(kind):
    with Peer(kind) as peer:
        machine = make_machine(host="another")
        assert refusal(machine.ipc_open, peer.handle) == "INVALID_VALUE"


def between_devices_that_do_not_reach_each_other(kind):
    with Peer(kind) as peer:
        machine = make_machine(peers=frozenset())
        assert refusal(machine.ipc_open, peer.handle) == "SUCCESS"  # the same device
        machine.set_current(machine.primary_retain(1))
        assert refusal(machine.ipc_open, peer.handle) == "PEER_ACCESS_UNSUPPORTED"


def an_instance(kind):
    # "CUDA IPC across GPU instances is not supported" (NVIDIA MIG User Guide)
    with Peer(kind) as peer:
        instances = ("MIG-00000000-0000-0000-0000-000000000001",)
        machine = make_machine(mig=instances)
        assert refusal(machine.ipc_export, machine.allocate(8)) == "NOT_SUPPORTED"
        assert refusal(machine.ipc_open, peer.handle) == "NOT_SUPPORTED"


def faults_reach_it(kind):
    with Peer(kind) as peer:
        machine = make_machine()
        refused = types.CUresult.CUDA_ERROR_MAP_FAILED
        machine.machine.faults.inject("cuIpcOpenMemHandle", refused)
        assert refusal(machine.ipc_open, peer.handle) == "MAP_FAILED"
        pointer = machine.ipc_open(peer.handle)
        machine.machine.faults.poison(types.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        for call, *arguments in (
            (machine.ipc_open, peer.handle),
            (machine.ipc_close, pointer),
            (machine.copy, pointer, pointer + 8, 8, 0),
            (machine.copy_to_host, pointer, 8),
            (machine.copy_from_host, pointer, b"8 bytes."),
            (machine.stream_create,),
            (machine.stream_synchronize, 0),
        ):
            assert refusal(call, *arguments) == "ILLEGAL_ADDRESS", call


def nothing_is_left_behind(kind):
    def shared():
        return set(os.listdir("/dev/shm"))

    before = shared()
    with Peer(kind) as peer:
        calls = calls_of(kind)
        calls.ipc_open(peer.handle)
        peer.process.kill()
        peer.process.wait()
    assert shared() == before
    pointers = [calls.allocate(4096) for _ in range(3)]
    for pointer in pointers:
        calls.copy_from_host(pointer, b"some")
    open_files = len(os.listdir("/proc/self/fd"))
    for pointer in pointers:
        calls.free(pointer)
    assert len(os.listdir("/proc/self/fd")) <= open_files - len(pointers)


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
    [
        of_another_machine,
        between_devices_that_do_not_reach_each_other,
        an_instance,
        faults_reach_it,
        nothing_is_left_behind,
    ],
    ids=lambda clause: clause.__name__,
)
def test_simulated(clause, child):
    assert hasattr(os, "memfd_create")
    child(clause, "simulated", beside=(*BESIDE, make_machine))
