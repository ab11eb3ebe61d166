"""The part in a worker's process: a task's way from its arrival to its result."""
