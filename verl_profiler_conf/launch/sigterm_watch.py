"""Ends a process whose main thread hangs in native code when SIGTERM comes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from verl_profiler_conf.launch.signal_log import log_without_hanging

START_PATIENCE = 20.0
"""Seconds that the main thread may take to come back from native code to Python, where the handler runs. Without this
package the process would have ended at once. So this is how much longer a job that hangs may live."""

STOP_PATIENCE = 2.0
"""Seconds that the thread of the watch may take to end."""

_STOP = b"\0"
"""No signal has the number 0."""


class Watch:
    """Ends the process when SIGTERM came and its handler does not get to run.

    Python's C handler writes each signal's number to the wake-up descriptor, whatever the main thread does. A process
    has one such descriptor, made for event loops. A descriptor that a loop has set stays as it is, and a loop may also
    replace ours later. There is no watch then, and the handler runs when the main thread comes back to Python. There is
    no watch on Windows either, where nobody can send SIGTERM.

    Args:
        in_force: whether our handler answers SIGTERM. Called in any thread.
    """

    def __init__(self, in_force: Callable[[], bool]) -> None:
        self._in_force = in_force
        self.answered = threading.Event()
        """Set when our handler runs, and when nothing is watched any more."""
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] | None = None

    def start(self) -> None:
        """Begin to watch. Only in the main thread. Does nothing while the watch runs."""
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
        """End the watch. Only in the main thread. Does nothing when the watch does not run."""
        if self._thread is None or self._pipe is None:
            return
        thread, self._thread = self._thread, None
        self.answered.set()
        with contextlib.suppress(BlockingIOError):  # full: the thread has more to read than it needs, and goes on
            os.write(self._pipe[1], _STOP)
        thread.join(STOP_PATIENCE)
        if not thread.is_alive():
            self._give_back(self._pipe[1])

    def leave_behind(self) -> None:
        """In a forked child: there is no thread, and signals of the child must not go into the pipe of its parent."""
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
        # other code that has replaced the descriptor may restore ours later. So the pipe stays open: otherwise a file
        # with the same number would be written to with every signal

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            reader, writer = self._pipe
            self._pipe = None
            os.close(writer)
            os.close(reader)

    def _run(self, reader: int) -> None:
        while True:
            numbers = os.read(reader, 64)
            if signal.SIGTERM in numbers and self._in_force() and not self.answered.wait(START_PATIENCE):
                end_by_force(self._in_force)
            if not numbers or _STOP in numbers:
                return


def _empty(reader: int) -> None:
    """Read what earlier signals have written into a pipe that stayed open."""
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(reader, 4096):
            pass
    os.set_blocking(reader, True)


def end_by_force(in_force: Callable[[], bool]) -> None:
    """End the process from another thread than the main one, unless the app now handles SIGTERM itself."""
    if not in_force():
        return
    log_without_hanging(
        "SIGTERM: the main thread has been in native code for %.0f seconds, where no handler can run; "
        "the process ends without closing its captures",
        START_PATIENCE,
    )
    if not in_force():
        return
    try:
        import ctypes

        # `signal.signal` works in the main thread only. With the default handler the exit status is SIGTERM's usual one
        set_handler = ctypes.pythonapi.PyOS_setsig
        set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        set_handler(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
        os.kill(os.getpid(), signal.SIGKILL)
