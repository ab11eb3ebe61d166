"""Torch: its allocator can be changed once, before the first allocation."""

from torch import cuda as cuda
