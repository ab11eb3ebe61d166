"""The threads of a worker: those of each device, and those of tasks without one."""
