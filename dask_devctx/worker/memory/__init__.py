"""Device memory that does not run out: each device has a limit, and values beyond it move away."""
