"""Log lines of a process that a signal ends: it may be in the middle of another one, or hang."""

from __future__ import annotations

import contextlib
import logging
import threading

log = logging.getLogger(__name__)

SAY_PATIENCE = 2.0
"""Seconds for the last log line of a process that hangs: the log itself may be what hangs."""


def say(text: str, *values: object) -> None:
    """Log from within a signal handler. It may have interrupted another write to the same stream, which then refuses a
    second one; that is no reason to lose a capture."""
    with contextlib.suppress(Exception):
        log.warning(text, *values)


def say_or_leave(text: str, *values: object) -> None:
    """Log from a thread that must not hang: the main thread may hold the log's lock, in a write that never ends."""
    thread = threading.Thread(target=say, args=(text, *values), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return
    thread.join(SAY_PATIENCE)
