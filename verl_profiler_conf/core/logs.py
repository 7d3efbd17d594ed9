"""Log lines that come once, although their cause may come with every iteration."""

from __future__ import annotations

import logging

_logged: set[tuple[str, str]] = set()
_reasons: set[str] = set()


def warn_once(log: logging.Logger, text: str, *, reason: str | None = None) -> None:
    """Log `text` as a warning, unless this logger has logged the same text before in this process.

    Args:
        log: where to.
        text: one line.
        reason: why there is no capture, as the manifest has it. The summary at the job's end does not repeat it.
    """
    if reason is not None:
        _reasons.add(reason)
    if (log.name, text) not in _logged:
        _logged.add((log.name, text))
        log.warning("%s", text)


def is_logged_reason(reason: str) -> bool:
    """Whether this process has logged why there is no capture, in these words, since its job began."""
    return reason in _reasons


def forget_logged_texts() -> None:
    """Let every text be logged again: a job begins in this process, or has ended."""
    _logged.clear()


def forget_reasons() -> None:
    """A job begins: what the log of an earlier one gave as a reason is not known to its reader."""
    _reasons.clear()
