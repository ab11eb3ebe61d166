"""RMM: a resource for each device, which allocates there."""

from rmm import mr as mr
