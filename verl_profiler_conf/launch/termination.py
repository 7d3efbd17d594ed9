"""SIGTERM, which a scheduler sends to a job that has to end. The capture is closed first. Then the process dies of the
signal, as it would without this package.

A signal handler closes the capture. Python runs handlers in the main thread only, between two steps of Python code. No
handler runs while that thread hangs in native code (a collective, a driver), and the job would outlive a signal that
would end it at once without this package. In that case a watch ends the process. It is a thread that reads the wake-up
descriptor of the process, to which Python's C handler writes. Handler and watch act only while the handler in force is
ours. A job that handles SIGTERM itself is never touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from verl_profiler_conf.launch.signal_log import log_in_handler, log_without_hanging
from verl_profiler_conf.launch.sigterm_watch import Watch

PATIENCE = 120.0
"""Seconds that closing may take. After that the signal ends the process all the same."""

_close: Callable[[], None] | None = None
_ending = 0
"""How many ends of jobs run in the main thread. The handler interrupts them, and lets them finish."""
_came_meanwhile: int | None = None
_deadline: threading.Timer | None = None


def close_on_sigterm(close: Callable[[], None]) -> None:
    """Call `close` when SIGTERM comes, then die of it.

    Nothing is done where the app has a handler of its own: it ends the job in its own way, and the job's end closes
    captures. Nothing is done outside the main thread either, where Python has no handlers.
    """
    global _close
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _on_sigterm):
        return
    _close = close
    _guard_forks()
    signal.signal(signal.SIGTERM, _on_sigterm)
    _watch.start()


def forget_sigterm() -> None:
    """Restore the default, unless the app has set its own handler meanwhile. The watch ends, and restores the wake-up
    descriptor. Outside the main thread only `close` is forgotten."""
    global _close
    _close = None
    if threading.current_thread() is not threading.main_thread():
        return
    if _in_force():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _watch.stop()


@contextlib.contextmanager
def sigterm_waits() -> Iterator[None]:
    """Put around the job's end. A SIGTERM that comes meanwhile ends the process only when the end is done, so no trace
    that is being written is lost. The limit is `PATIENCE` here too."""
    global _ending, _came_meanwhile
    if threading.current_thread() is not threading.main_thread():  # the handler waits for the lock of the job's end
        yield
        return
    _ending += 1
    try:
        yield
    finally:
        _ending -= 1
        if not _ending and _came_meanwhile is not None:
            number, _came_meanwhile = _came_meanwhile, None
            _die_of(number)


def is_terminating() -> bool:
    """Whether SIGTERM came. From then on nothing but captures is worth waiting for."""
    return _deadline is not None


def _in_force() -> bool:
    """Whether our handler answers SIGTERM. May be called in any thread."""
    return signal.getsignal(signal.SIGTERM) is _on_sigterm


def _on_sigterm(number: int, _: FrameType | None) -> None:
    global _came_meanwhile, _deadline
    if not _in_force():
        return  # the app's own handler calls the one that it has replaced: the app decides how the job ends
    close = _close
    _watch.answered.set()
    # from here on the default holds: a second signal ends the process at once, and so does the deadline
    signal.signal(number, signal.SIG_DFL)
    _deadline = threading.Timer(PATIENCE, _out_of_time, (number,))
    _deadline.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can start any more: the interpreter is on its way out
        _deadline.start()
    if _ending:
        log_in_handler("SIGTERM: the job is ending already, its captures are finished first")
        _came_meanwhile = number
        return
    try:
        if close is not None:
            log_in_handler("SIGTERM: closing the capture first")
            close()
    except Exception as error:
        log_in_handler("the capture could not be closed: %s: %s", type(error).__name__, error)
    finally:
        _die_of(number)


def _die_of(number: int) -> None:
    """The default is in force, so this ends the process. Only the first process of a container has no default."""
    if _deadline is not None:
        _deadline.cancel()
    os.kill(os.getpid(), number)


def _out_of_time(number: int) -> None:
    log_without_hanging(
        "SIGTERM: captures could not be closed within %.0f seconds, the process ends without them", PATIENCE
    )
    os.kill(os.getpid(), number)


_watch = Watch(_in_force)


# -- forks -----------------------------------------------------------------------------------------------------------

_forks_guarded = False
_masks = threading.local()


def _guard_forks() -> None:
    """A forked child has no capture to close, and dies of SIGTERM as usual.

    A signal to a child that has just been forked waits until our handler is removed there. Otherwise Python would drop
    the signal, and its number in the pipe would look like a signal to the parent.
    """
    global _forks_guarded
    if not _forks_guarded and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_hold_back, after_in_child=_forget_in_child, after_in_parent=_let_through)
        _forks_guarded = True


def _hold_back() -> None:
    if _in_force():
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    before = _masks.__dict__.pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forget_in_child() -> None:
    global _close, _ending, _came_meanwhile
    _close, _ending, _came_meanwhile = None, 0, None
    if _in_force():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _watch.leave_behind()
    _let_through()
