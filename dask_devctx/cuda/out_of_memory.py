"""Out of memory: recognise it in the error of any library, and make room (text: `errors.py`)."""
# This imports no library: one that is not imported has raised no error and holds no memory.

from __future__ import annotations

import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from opcode import opmap
from types import FrameType
from typing import Any, Final, TypeVar

from dask_devctx.driver.statuses import OUT_OF_MEMORY
from dask_devctx.errors import DeviceMemoryError, DriverError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# By the first part of the module that defines the exception's class, and the class's name.
_CLASSES = {
    ("cupy", "OutOfMemoryError"),
    ("torch", "OutOfMemoryError"),
}
# Libraries whose exceptions carry the status of the driver or the runtime, and the attribute that
# has it. Driver and runtime use the same number.
_STATUS = {
    ("cupy_backends", "status"),
    ("cupy", "status"),
    ("numba", "code"),
    ("numba_cuda", "code"),
}
# The words of other errors: cuBLAS and similar libraries, older torch without a class, RMM, JAX.
_WORDS = re.compile(
    r"_STATUS_ALLOC_FAILED|CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|"
    r"RESOURCE_EXHAUSTED: Out of memory"
)
_RMM_WORDS = re.compile(r"std::bad_alloc|out_of_memory")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# torch, and JAX.
_TRIED_SIZE = re.compile(r"Tr(?:ied|ying) to allocate ([\d.]+) ?([KMGT]?)i?B", re.IGNORECASE)
_CUPY_SIZE = re.compile(r"Out of memory allocating ([\d,]+) bytes")
_RMM_SIZE = re.compile(r"(?:allocate|size)\D{0,3}([\d]+) ?(?:bytes|B)", re.IGNORECASE)


_RESUMABLE: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or one of its causes says that a device is out of memory."""
    return any(_says_it(one) for one in _chain(error))


def allocated(allocate: Callable[[], T], *make_room: Callable[[], object]) -> T:
    """Return what a function allocates; out of memory, it is called again after each of others."""
    for room in make_room:
        try:
            return allocate()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        room()
    return allocate()


def requested_nbytes(error: BaseException) -> int | None:
    """Return how many bytes the failed call asked for, or None if the exception does not say it."""
    for one in _chain(error):
        if isinstance(one, DeviceMemoryError) and one.nbytes is not None:
            return one.nbytes
        text = str(one)
        if match := _CUPY_SIZE.search(text):
            return int(match[1].replace(",", ""))
        if match := _TRIED_SIZE.search(text):
            return round(float(match[1]) * _UNITS[match[2].upper()])
        if type(one) is MemoryError and (match := _RMM_SIZE.search(text)):
            return int(match[1])
    return None


def clear_frames(error: BaseException) -> None:
    """Let the frames of an exception, and of its causes, that have ended forget their arrays."""
    # A generator or coroutine that is suspended goes on as it was: it may be the frame of an
    # exception that it has published and outlives.
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    frames: set[FrameType] = set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        left += [one.__cause__, one.__context__]
        for step, _ in traceback.walk_tb(one.__traceback__):
            frame: FrameType | None = step
            while frame is not None and frame not in frames:  # its callers, also those left out
                frames.add(frame)
                if _is_suspended(frame):
                    break
                try:
                    frame.clear()
                except RuntimeError:  # this one, and those that called it, have not ended
                    break
                frame = frame.f_back


def _is_suspended(frame: FrameType) -> bool:
    """Return whether a frame waits to be continued, where Python's ``clear`` would end it."""
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & _RESUMABLE:
        return False
    return frame.f_lasti >= 0 and code.co_code[frame.f_lasti] == opmap["YIELD_VALUE"]


def release_library_caches() -> None:
    """Make the libraries give the memory that they cache back to the current device."""
    for release in (_release_cupy, _release_torch):
        try:
            release()
        except Exception:  # the library is half imported or broken: the retry will show it
            logger.warning("a library's cache could not be released", exc_info=True)


def _release_cupy() -> None:
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()
        if cupy.cuda.get_allocator() == cupy.cuda.malloc_async:
            runtime = cupy.cuda.runtime
            runtime.memPoolTrimTo(runtime.deviceGetDefaultMemPool(runtime.getDevice()), 0)


def _release_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def _says_it(error: BaseException) -> bool:
    if isinstance(error, DriverError):
        return error.code == OUT_OF_MEMORY
    for base in type(error).__mro__:
        library = base.__module__.partition(".")[0]
        if (library, base.__name__) in _CLASSES:
            return True
        for name, attribute in _STATUS:
            if name == library and _number(getattr(error, attribute, None)) == OUT_OF_MEMORY:
                return True
    text = str(error)
    if _WORDS.search(text):
        return True
    # RMM raises Python's MemoryError. So does a full host. Only the words differ.
    return isinstance(error, MemoryError) and bool(_RMM_WORDS.search(text))


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
