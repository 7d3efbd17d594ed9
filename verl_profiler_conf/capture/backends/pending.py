"""Recordings that are not exported yet, and the guarantee that they are before another profiler is prepared.

Kineto exports the times of device events with a converter that the next prepared profiler replaces. So whenever Python
code prepares a profiler, an engine's own code too, what is pending is exported first. For this the function
`torch.autograd.profiler._prepare_profiler` is replaced while anything is pending or prepared, and restored afterwards.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

_NAME = "_prepare_profiler"


class Pending(Protocol):
    """A recording that can be exported."""

    def save(self) -> None:
        """Export it, once. Returns when it is done, whichever thread does it."""
        ...


class _Guard:
    """The replaced function, and the recordings that it guards. A recording without any reference needs no export."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.recordings: weakref.WeakSet[Pending] = weakref.WeakSet()
        self.watchers = 0
        self.prepared = 0
        self.original: Callable[..., Any] | None = None
        self.hook: Callable[..., Any] | None = None


_guard = _Guard()


def _forget() -> None:
    """In a forked child: it has no recordings and no watchers, and the thread that held the lock is not there."""
    _guard.lock = threading.Lock()
    _guard.recordings, _guard.watchers = weakref.WeakSet(), 0
    _update()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def add(recording: Pending) -> None:
    """A recording has ended and holds device ticks until it is exported."""
    with _guard.lock:
        _guard.recordings.add(recording)
        _update()


def remove(recording: Pending) -> None:
    """The recording is exported or dropped. Harmless when it was never added."""
    with _guard.lock:
        _guard.recordings.discard(recording)
        _update()


def export_all() -> None:
    """Export what is pending. A failure is logged only: it must not harm the code that prepares a profiler."""
    with _guard.lock:
        recordings = list(_guard.recordings)
    for recording in recordings:
        try:
            recording.save()
        except Exception as error:
            log.warning("a trace could not be exported before another profiler was prepared: %s", error)
            remove(recording)
    with _guard.lock:
        _update()


def count_prepared() -> int:
    """How many profilers have been prepared in this process, as far as it was watched."""
    return _guard.prepared


def watch() -> bool:
    """Count prepared profilers from here on, until `unwatch`.

    Returns:
        Whether this torch can be watched.
    """
    with _guard.lock:
        _guard.watchers += 1
        _update()
        if _guard.hook is None:
            _guard.watchers -= 1
            return False
        return True


def unwatch() -> None:
    """The end of one successful `watch`."""
    with _guard.lock:
        _guard.watchers -= 1
        _update()


def _update() -> None:
    """Replace torch's function or give it back. The caller holds the lock."""
    module = sys.modules.get("torch.autograd.profiler")
    if _guard.recordings or _guard.watchers:
        original = getattr(module, _NAME, None)
        if _guard.hook is None and original is not None:
            _guard.original, _guard.hook = original, _exporting_first(original)
            setattr(module, _NAME, _guard.hook)
    elif _guard.hook is not None:
        if getattr(module, _NAME, None) is _guard.hook:  # else other code has wrapped it, and it stays: it does no harm
            setattr(module, _NAME, _guard.original)
        _guard.original = _guard.hook = None


def _exporting_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        export_all()
        _guard.prepared += 1
        return original(*args, **kwargs)

    return prepare
