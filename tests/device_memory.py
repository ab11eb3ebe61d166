"""Bytes in device memory, read and written after all work in blocking streams."""

from __future__ import annotations

import ctypes


def read(work, pointer, nbytes):
    host = ctypes.create_string_buffer(nbytes)
    work.copy_out(ctypes.addressof(host), pointer, nbytes, 0)
    work.stream_synchronize(0)
    return host.raw


def write(work, pointer, data):
    host = ctypes.create_string_buffer(data, len(data))
    work.copy_in(pointer, ctypes.addressof(host), len(data), 0)
    work.stream_synchronize(0)
