"""Log lines of a process that a signal ends. The signal may have come in the middle of another log line, or the process
may hang."""

from __future__ import annotations

import contextlib
import logging
import threading

log = logging.getLogger(__name__)

LOG_PATIENCE_S = 2.0
"""Seconds for the last log line of a process that hangs: the log itself may be what hangs."""


def log_in_handler(text: str, *values: object) -> None:
    """Log from within a signal handler. The handler may have interrupted a write to the same stream, which then refuses
    a second one. That is no reason to lose a capture."""
    with contextlib.suppress(Exception):
        log.warning(text, *values)


def log_without_hanging(text: str, *values: object) -> None:
    """Log from a thread that must not hang: the main thread may hold the log's lock, in a write that never ends."""
    thread = threading.Thread(target=log_in_handler, args=(text, *values), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return
    thread.join(LOG_PATIENCE_S)
