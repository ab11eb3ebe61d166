"""Simulated device memory: addresses, contents, and handles for other processes.

The contents are host memory. It is made at the first read or write, so a device of 16 GiB costs
nothing until it is used. A process exports memory to another one as an anonymous file
(``memfd_create``), which the other process opens through ``/proc``. The file goes with the last
process that has it open, so a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
import threading
import uuid
from typing import Any, NamedTuple

from dask_devctx.driver.simulated.devices import Context, SimulatedGPU
from dask_devctx.driver.simulated.faults import Refused, Status

_FIRST_ADDRESS = 0x7F00_0000_0000
_PAGE = 2 * 2**20  # one stays free after each block, so that no overrun meets another block
_HANDLE = struct.Struct("=4siiQ16s16s12x")  # 64 bytes, as a CUipcMemHandle has
_MARK = b"sim1"


class Handle(NamedTuple):
    """The contents of a handle: the memory's process and GPU, and how to find the memory."""

    pid: int
    fd: int
    nbytes: int
    gpu: uuid.UUID
    token: bytes

    def pack(self) -> bytes:
        return _HANDLE.pack(_MARK, self.pid, self.fd, self.nbytes, self.gpu.bytes, self.token)

    @classmethod
    def unpack(cls, raw: bytes) -> Handle | None:
        mark, pid, fd, nbytes, gpu, token = _HANDLE.unpack(raw)
        return cls(pid, fd, nbytes, uuid.UUID(bytes=gpu), token) if mark == _MARK else None

    def is_of(self, gpu: SimulatedGPU) -> bool:
        return self.gpu == uuid.UUID(gpu.uuid.removeprefix("GPU-"))

    def contents(self) -> mmap.mmap | None:
        """Map the exporter's memory; None where it was freed, or is in another container."""
        if self.fd < 0:
            return None
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            if not self._names(path):
                return None
            fd = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            return mmap.mmap(fd, self.nbytes) if self._names(f"/proc/self/fd/{fd}") else None
        finally:
            os.close(fd)

    def _names(self, path: str) -> bool:
        # A descriptor's number can be used again; a token never is.
        return self.token.hex() in os.readlink(path)


class Block:
    """One allocation, or memory of another process that was opened here."""

    def __init__(
        self, context: Context, base: int, nbytes: int, contents: mmap.mmap | None = None
    ) -> None:
        self.context = context
        self.base = base  # its address on the device
        self.nbytes = nbytes
        self.opened: Handle | None = None
        self.uses = 1  # how often it was opened
        self.alive = True  # until it is freed, or its context ends
        self._lock = threading.RLock()  # the garbage collector may free this block meanwhile
        self._fd = -1
        self._token = b""
        self._exported = False
        self._lent = False
        self._keep: Any = contents  # None: made when it is needed
        self._address = 0 if contents is None else _address(contents)

    def lend(self, array: Any) -> None:
        """Use a NumPy array's memory as the contents, which then cannot be exported."""
        self._keep, self._lent = array, True

    def host_address(self, address: int) -> int:
        """Return the host address of the byte at a device address."""
        with self._lock:
            if not self._address:
                if self._lent:
                    self._address = self._keep.__array_interface__["data"][0]
                else:
                    self._make()
        return self._address + address - self.base

    def _make(self) -> None:
        self._token = secrets.token_bytes(16)
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(f"simulated-gpu-{self._token.hex()}")
            os.ftruncate(self._fd, self.nbytes)
        self._keep = mmap.mmap(self._fd, self.nbytes)
        self._address = _address(self._keep)

    def export(self) -> Handle | None:
        """Return a handle for other processes; None for memory that is lent, or is not a file."""
        self.host_address(self.base)
        if self._fd < 0:
            return None
        self._exported = True
        gpu = uuid.UUID(self.context.gpu.uuid.removeprefix("GPU-"))
        return Handle(os.getpid(), self._fd, self.nbytes, gpu, self._token)

    def release(self) -> None:
        """Give up the contents. Processes that have the memory open read rubbish from then on."""
        with self._lock:
            self.alive = False
            if self._exported:
                ctypes.memset(self._address, 0xDB, self.nbytes)
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _address(contents: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(contents))


class Memory:
    """All memory that one process has on its simulated GPUs; no address is used twice."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._next = _FIRST_ADDRESS
        self._lock = threading.RLock()

    def allocate(self, context: Context, nbytes: int) -> int | None:
        """Take memory from the context's GPU; None where not enough is free."""
        with self._lock:
            if context.gpu.used_memory + nbytes > context.gpu.total_memory:
                return None
            context.gpu.used_memory += nbytes
            return self._add(context, nbytes, None).base

    def _add(self, context: Context, nbytes: int, contents: mmap.mmap | None) -> Block:
        block = Block(context, self._next, nbytes, contents)
        self._next += (-(-nbytes // _PAGE) + 1) * _PAGE
        self._blocks[block.base] = block
        return block

    def free(self, base: int) -> bool:
        """Free an allocation; False where none begins at this address."""
        with self._lock:
            block = self._blocks.get(base)
            if block is None or block.opened:
                return False
            self._remove(block)
            return True

    def _remove(self, block: Block) -> None:
        del self._blocks[block.base]
        if not block.opened:
            block.context.gpu.used_memory -= block.nbytes
        block.release()

    def end(self, context: Context) -> None:
        """Free all memory of a context."""
        with self._lock:
            for block in self._all():
                if block.context is context:
                    self._remove(block)

    def find(self, address: int, nbytes: int = 1) -> Block | None:
        """Return the block that contains all of these bytes."""
        beginning = self._blocks.get(address)
        for block in [beginning] if beginning else self._all():
            if block.base <= address < block.base + block.nbytes:
                return block if address + nbytes <= block.base + block.nbytes else None
        return None

    def _all(self) -> list[Block]:
        # A list: the garbage collector may free some of them between any two steps.
        return list(self._blocks.values())

    def copy(self, target: int, source: int, nbytes: int) -> bool:
        """Copy between two blocks; False where not all of these bytes belong to blocks."""
        to, of = self.find(target, nbytes), self.find(source, nbytes)
        if to is None or of is None:
            return False
        ctypes.memmove(to.host_address(target), of.host_address(source), nbytes)
        return True

    # -- memory of other processes

    def open(self, handle: Handle, context: Context) -> int:
        """Map another process's memory for a context; return the address."""
        with self._lock:
            for block in self._all():
                if block.opened == handle and block.context is context:
                    block.uses += 1
                    return block.base
            contents = handle.contents()
            if contents is None:
                raise Refused(Status.CUDA_ERROR_INVALID_VALUE)
            block = self._add(context, handle.nbytes, contents)
            block.opened = handle
            return block.base

    def close(self, base: int) -> bool:
        """Undo one opening; False where nothing is open at this address."""
        with self._lock:
            block = self._blocks.get(base)
            if block is None or not block.opened:
                return False
            block.uses -= 1
            if not block.uses:
                self._remove(block)
            return True
