"""The choice of a device for a task, and when the task may start."""
