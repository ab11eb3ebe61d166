"""The part in the scheduler's process: it sends tasks to the workers that have their devices."""
