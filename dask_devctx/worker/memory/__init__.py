"""Device memory that does not run out: the limit of each device, and the values beyond it."""
