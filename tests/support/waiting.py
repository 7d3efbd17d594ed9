"""Waiting for what has to happen. A wait ends when it has happened, and fails when it does not; none is for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = 120.0) -> T:
    """The first answer of `condition` that is true. For what another process does, and nothing tells of.

    Raises:
        TimeoutError: it was not true within that many seconds.
    """
    end = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
    return answer


async def wait_until_async(condition: Callable[[], T], what: str, seconds: float = 120.0) -> T:
    """As `wait_until`, while other tasks of the event loop go on."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.002)
    return answer


@contextmanager
def when_logged(words: str, do: Callable[[], object]) -> Iterator[None]:
    """Call `do` once, as soon as the package logs a line with these words."""

    class Listener(logging.Handler):
        heard = False

        def emit(self, record: logging.LogRecord) -> None:
            if not self.heard and words in record.getMessage():
                self.heard = True
                do()

    listener = Listener()
    logger = logging.getLogger("verl_profiler_conf")
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
