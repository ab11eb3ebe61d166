"""Torch's memory from RMM."""

from torch.cuda.memory import CUDAPluggableAllocator

rmm_torch_allocator = CUDAPluggableAllocator(
    "_torch_allocator.so", alloc_fn_name="allocate", free_fn_name="deallocate"
)
