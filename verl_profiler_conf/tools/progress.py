"""A progress bar for whatever takes more than a second, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 1.0
"""Seconds before a bar appears: a command that is done by then shows none."""


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function to call with the bytes read so far and the size of the file.

    None where no terminal would show a bar. Several files, or several readings of one, follow each other on it.

    Args:
        description: stands before the bar.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description)
    began = time.monotonic()

    def advance(done: int, size: int) -> None:
        if not bar.live.is_started and time.monotonic() - began > PATIENCE:
            bar.start()
        bar.update(task, completed=done, total=size)

    try:
        yield advance
    finally:
        bar.stop()
