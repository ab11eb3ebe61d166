"""The lines of this package's loggers, shown and kept as dask shows and keeps its own."""

from __future__ import annotations

import logging
from logging.handlers import QueueHandler


class ShownAsDasks(logging.Handler):
    """Hands lines to the handlers of dask's logger, which add the time, the level and the logger.

    Python shows the warnings of a logger without handlers as bare text. dask sets up handlers for
    its own loggers only.

    Where the program or dask's configuration has set up logging for this package, nothing is shown
    twice: this handler is silent.
    """

    def emit(self, record: logging.LogRecord) -> None:
        package = logging.getLogger("dask_devctx")
        others = [one for one in package.handlers if isinstance(one, logging.StreamHandler)]
        if others or logging.getLogger().handlers:
            return
        shown: list[logging.Handler | None] = [*logging.getLogger("distributed").handlers]
        for handler in shown or [logging.lastResort]:
            if handler is not None and record.levelno >= handler.level:
                handler.handle(record)


class AsText(QueueHandler):
    """Hands lines to a handler that keeps them, with their errors as text.

    The frames of an error have values, which would stay as long as the line.
    """

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue.handle(record)  # type: ignore[attr-defined]  # a handler is in its place
