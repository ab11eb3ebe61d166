from __future__ import annotations


class CUDAPluggableAllocator:
    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        self.path = path_to_so_file


current: CUDAPluggableAllocator | None = None


def change_current_allocator(allocator: CUDAPluggableAllocator) -> None:
    global current
    if current is not None:
        raise RuntimeError("Can't swap an already initialized allocator")
    current = allocator
