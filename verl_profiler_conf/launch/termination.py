"""SIGTERM: what a scheduler sends to a job that has to go. The capture is closed first, then the process dies of the
signal as it would have without us."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that closing may take before the signal's default, death, has its way all the same."""

START_PATIENCE = 20.0
"""Seconds that the main thread may take to come back from native code to Python, where the handler runs. A job that
hangs there (a collective, a driver) would otherwise outlive the signal."""

_close: Callable[[], None] | None = None
_began = threading.Event()


def close_on_sigterm(close: Callable[[], None]) -> None:
    """Call `close` when SIGTERM comes, then die of it. Nothing is done where the app has a handler of its own (it ends
    the job its way, and the job's end closes captures), nor outside the main thread, where Python has no handlers."""
    global _close
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    _close = close
    _began.clear()
    signal.signal(signal.SIGTERM, _on_sigterm)
    _watch_for_a_hang()
    _forget_in_children()


def forget_sigterm() -> None:
    """Back to the default, unless the app has set its own handler meanwhile."""
    global _close
    _close = None
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, _: FrameType | None) -> None:
    close = _close
    _began.set()
    # from here on the default holds: a second signal ends the process at once, and so does the watchdog
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watchdog = threading.Timer(PATIENCE, os.kill, (os.getpid(), number))
    watchdog.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can start any more: the interpreter is on its way out
        watchdog.start()
    try:
        if close is not None:
            log.warning("SIGTERM: closing the capture first")
            close()
    except Exception as error:
        log.warning("the capture could not be closed: %s: %s", type(error).__name__, error)
    finally:
        os.kill(os.getpid(), number)


_watching = False


def _watch_for_a_hang() -> None:
    """End the process by force when SIGTERM came and its handler does not get to run.

    Python writes the signal's number to the wake-up descriptor from the C handler, whatever the main thread does. There
    is one descriptor in a process: an event loop's own is left in place, and may take this one's later.
    """
    global _watching
    if _watching:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    theirs = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if theirs != -1:
        signal.set_wakeup_fd(theirs)
        os.close(reader)
        os.close(writer)
        return
    _watching = True
    threading.Thread(target=_await_handler, args=(reader,), name="verl-profiler-sigterm", daemon=True).start()


def _await_handler(reader: int) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGTERM in numbers and _close is not None and not _began.wait(START_PATIENCE):
            os.kill(os.getpid(), signal.SIGKILL)  # the handler of SIGTERM cannot be taken back from this thread


_registered = False


def _forget_in_children() -> None:
    """A forked child has no capture of ours to close, and dies of SIGTERM as ever."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget_sigterm)
        _registered = True
