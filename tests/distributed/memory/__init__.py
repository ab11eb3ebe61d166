"""Device memory that does not run out."""
