"""The values that a worker keeps, and what its tasks do with them."""
