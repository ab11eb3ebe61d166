"""Failures of devices and memory: the right task errs, no result is lost, the worker restarts."""
