"""The inputs of a task, on its device before it starts."""
