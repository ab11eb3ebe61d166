"""Numba's memory from RMM."""


class RMMNumbaManager:
    interface_version = 1

    def __init__(self, context: object = None) -> None:
        self.context = context
