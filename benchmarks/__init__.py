"""Measures this package beside its peers: ``python -m benchmarks``.

All contenders of a case are measured in the same run, in interleaved rounds. A machine that slows
down then slows all of them down. Contenders that cannot run are named, with the reason.
"""
