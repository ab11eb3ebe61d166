"""The devices that a worker has for itself: locks, its part of a shared set, its announcement."""
