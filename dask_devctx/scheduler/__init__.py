"""What runs in the scheduler's process: tasks led to the workers that have their devices."""
