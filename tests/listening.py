"""What accel_shard logs in a block, and nothing of it left behind: ranks are warm, and the next test has them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def listening(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect messages of this level and above."""
    logger, handler = logging.getLogger("accel_shard"), _Lines()
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)
