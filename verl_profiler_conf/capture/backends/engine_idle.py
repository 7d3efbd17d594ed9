"""Knows whether the engine of this process runs. An export that stops every thread can wait until it is idle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

EXPORT_WAIT_S = 30.0
"""Seconds that an export waits for an idle engine at most. The trace is then exported all the same."""

_changed = threading.Condition()
_is_idle = True


def engine_runs() -> None:
    """A capture begins: the engine is at work until `engine_is_idle` is called."""
    global _is_idle
    with _changed:
        _is_idle = False


def engine_is_idle() -> None:
    """The engine has nothing left to run, or the job ends: exports that wait may begin now."""
    global _is_idle
    with _changed:
        _is_idle = True
        _changed.notify_all()


@contextlib.contextmanager
def engine_stands_still() -> Iterator[None]:
    """The engine's thread waits for the writer within this block."""
    global _is_idle
    with _changed:
        before, _is_idle = _is_idle, True
        _changed.notify_all()
    try:
        yield
    finally:
        with _changed:
            _is_idle = before


def wait_until_idle(limit_s: float = EXPORT_WAIT_S) -> bool:
    """Wait for an idle engine.

    Args:
        limit_s: seconds to wait at most.

    Returns:
        Whether the engine is idle.
    """
    with _changed:
        return _changed.wait_for(lambda: _is_idle, limit_s)
