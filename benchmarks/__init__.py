"""Measures this package beside its peers: ``python -m benchmarks``.

All contenders of a case are measured in the same run, in interleaved rounds, so that a machine
that slows down slows all of them down. What cannot run here is named, and never guessed.
"""
