"""SIGTERM: what a scheduler sends to a job that has to go. The capture is closed first, then the process dies of the
signal as it would have without us.

A signal handler closes the capture. Python runs handlers in the main thread only, between two steps of Python code.
While that thread hangs in native code (a collective, a driver) no handler runs, and the job would outlive a signal that
ends it at once without us. A watch ends the process then: a thread, and the process's wake-up descriptor, to which
Python's C handler writes. Handler and watch act only while the handler in force is ours. A job that handles SIGTERM
itself is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

log = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds that closing may take before the signal's default, death, has its way all the same."""

START_PATIENCE = 20.0
"""Seconds that the main thread may take to come back from native code to Python, where the handler runs. Without us the
process would have ended at once, so this is what a capture may cost a job that hangs."""

SAY_PATIENCE = 2.0
"""Seconds for the last log line of a process that hangs: the log itself may be what hangs."""

_close: Callable[[], None] | None = None
_ending = 0
"""How many job ends the main thread is in: they are not to be cut short by the handler that interrupts them."""
_came_meanwhile: int | None = None
_deadline: threading.Timer | None = None


def close_on_sigterm(close: Callable[[], None]) -> None:
    """Call `close` when SIGTERM comes, then die of it. Nothing is done where the app has a handler of its own (it ends
    the job its way, and the job's end closes captures), nor outside the main thread, where Python has no handlers."""
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
    """Back to the default, unless the app has set its own handler meanwhile. The watch ends, and gives back what it
    took of the process. In another thread than the main one only `close` is forgotten."""
    global _close
    _close = None
    if threading.current_thread() is not threading.main_thread():
        return
    if _in_force():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _watch.stop()


@contextlib.contextmanager
def sigterm_waits() -> Iterator[None]:
    """Put around the job's end: SIGTERM that comes meanwhile ends the process when that is done, and loses no trace
    that is being written. The limit is the same, `PATIENCE`."""
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
    """Whether SIGTERM came: nothing but captures is worth waiting for any more."""
    return _deadline is not None


def _in_force() -> bool:
    """Whether SIGTERM still is ours to answer. May be asked in any thread."""
    return signal.getsignal(signal.SIGTERM) is _on_sigterm


def _on_sigterm(number: int, _: FrameType | None) -> None:
    global _came_meanwhile, _deadline
    if not _in_force():
        return  # the app's own handler calls the one that it found; how the job ends is for the app to say
    close = _close
    _watch.answered.set()
    # from here on the default holds: a second signal ends the process at once, and so does the deadline
    signal.signal(number, signal.SIG_DFL)
    _deadline = threading.Timer(PATIENCE, _out_of_time, (number,))
    _deadline.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can start any more: the interpreter is on its way out
        _deadline.start()
    if _ending:
        _say("SIGTERM: the job is ending already, its captures are finished first")
        _came_meanwhile = number
        return
    try:
        if close is not None:
            _say("SIGTERM: closing the capture first")
            close()
    except Exception as error:
        _say("the capture could not be closed: %s: %s", type(error).__name__, error)
    finally:
        _die_of(number)


def _die_of(number: int) -> None:
    """The default is in force: this ends the process, unless that is the first of a container, which has no default."""
    if _deadline is not None:
        _deadline.cancel()
    os.kill(os.getpid(), number)


def _out_of_time(number: int) -> None:
    _say_or_leave("SIGTERM: captures could not be closed within %.0f seconds, the process ends without them", PATIENCE)
    os.kill(os.getpid(), number)


def _say(text: str, *values: object) -> None:
    """Log from within a signal handler. It may have interrupted another write to the same stream, which then refuses a
    second one; that is no reason to lose a capture."""
    with contextlib.suppress(Exception):
        log.warning(text, *values)


def _say_or_leave(text: str, *values: object) -> None:
    """Log from a thread that must not hang: the main thread may hold the log's lock, in a write that never ends."""
    thread = threading.Thread(target=_say, args=(text, *values), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return
    thread.join(SAY_PATIENCE)


# -- the watch -------------------------------------------------------------------------------------------------------


class _Watch:
    """Ends the process when SIGTERM came and its handler does not get to run.

    Python's C handler writes each signal's number to the wake-up descriptor, whatever the main thread does. A process
    has one such descriptor, made for event loops. Where a loop has set it already it is left alone, and a loop may take
    it over later; there is no watch then, and the handler runs when the main thread comes back to Python. There is none
    on Windows, where nobody can send SIGTERM.
    """

    def __init__(self) -> None:
        self.answered = threading.Event()
        """Our handler runs, or nothing is watched any more."""
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] | None = None

    def start(self) -> None:
        """In the main thread. Without effect while it runs."""
        if not hasattr(os, "register_at_fork") or self._thread is not None:
            return
        self.answered.clear()
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
        reader, writer = self._pipe
        _empty(reader)
        found = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if found not in (-1, writer):
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
            self._close_pipe()
            return
        self._thread = threading.Thread(target=self._run, args=(reader,), name="verl-profiler-sigterm", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: SIGTERM is answered as soon as the main thread can
            self._thread = None
            self._give_back(writer)

    def stop(self) -> None:
        """In the main thread. Without effect when it does not run."""
        if self._thread is None or self._pipe is None:
            return
        thread, self._thread = self._thread, None
        self.answered.set()
        with contextlib.suppress(BlockingIOError):  # full: the thread has more to read than it needs, and goes on
            os.write(self._pipe[1], _STOP)
        thread.join(SAY_PATIENCE)
        if not thread.is_alive():
            self._give_back(self._pipe[1])

    def leave_behind(self) -> None:
        """In a forked child: no thread, and no byte of the child's signals into the pipe of its parent."""
        self._thread = None
        self.answered = threading.Event()
        if self._pipe is not None:
            self._give_back(self._pipe[1])

    def _give_back(self, writer: int) -> None:
        found = signal.set_wakeup_fd(-1)
        if found == writer:
            self._close_pipe()
        elif found != -1:
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        # who took the descriptor over may put ours back later, so the pipe stays: a file that got the same number would
        # be written to with every signal

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            reader, writer = self._pipe
            self._pipe = None
            os.close(writer)
            os.close(reader)

    def _run(self, reader: int) -> None:
        while True:
            numbers = os.read(reader, 64)
            if signal.SIGTERM in numbers and _in_force() and not self.answered.wait(START_PATIENCE):
                _end_by_force()
            if not numbers or _STOP in numbers:
                return


def _empty(reader: int) -> None:
    """Read what a pipe that stayed has got from signals of the past."""
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(reader, 4096):
            pass
    os.set_blocking(reader, True)


_STOP = b"\0"
"""No signal has the number 0."""

_watch = _Watch()


def _end_by_force() -> None:
    """End the process from another thread than the main one, unless SIGTERM has become the app's to answer."""
    if not _in_force():
        return
    _say_or_leave(
        "SIGTERM: the main thread has been in native code for %.0f seconds, where no handler can run; "
        "the process ends without closing its captures",
        START_PATIENCE,
    )
    if not _in_force():
        return
    try:
        import ctypes

        # `signal.signal` serves the main thread only; with the default back, the exit status is that of any SIGTERM
        set_handler = ctypes.pythonapi.PyOS_setsig
        set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        set_handler(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
        os.kill(os.getpid(), signal.SIGKILL)


# -- forks -----------------------------------------------------------------------------------------------------------

_forks_guarded = False
_masks = threading.local()


def _guard_forks() -> None:
    """A forked child has no capture of ours to close, and dies of SIGTERM as ever.

    A signal to a child that has just been forked waits until our handler is gone there. Without that Python drops it,
    and the pipe tells the parent that the signal was meant for it.
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
