"""Log lines that come once, although their cause may come with every iteration."""

from __future__ import annotations

import logging

_logged: set[tuple[str, str]] = set()


def warn_once(log: logging.Logger, text: str) -> None:
    """Log `text` as a warning, unless this logger has logged the same text before in this process."""
    if (log.name, text) not in _logged:
        _logged.add((log.name, text))
        log.warning("%s", text)


def forget_logged_texts() -> None:
    """Let every text be logged again: another job begins in this process."""
    _logged.clear()
