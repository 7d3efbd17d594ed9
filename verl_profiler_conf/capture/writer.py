"""Writes traces on a thread of its own, one after the other.

The thread has normal priority, on purpose. A thread of low priority that holds Python's lock and is not scheduled stops
all other threads: measured on busy cores, exports took 20 times as long and iterations stalled for seconds.

A trace that could not be written is tried again when the job ends: there may be room or descriptors then. One that
never comes to an end is given up, after a time or at the first Ctrl-C, and the process can end.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_profiler_conf.capture.backends.base import Recording, Written
from verl_profiler_conf.capture.interruptions import end_without_exit_handlers

log = logging.getLogger(__name__)

OnDone = Callable[["Written | None", "BaseException | None"], None]
"""Called with what was written or with the error, on the writer's thread or on that of whoever gives up. Again when a
trace that could not be written is written after all."""

NameOf = Callable[[], Path]
"""Names a trace when it is about to be written. Raises OSError where that cannot be done."""

PATIENCE_S = 600.0
"""Seconds without a single finished trace after which the end of a job gives up those that are left."""

LOG_EVERY_S = 30.0
"""Seconds after which the log says that traces are waited for, again and again."""

MOST_FAILED = 4
"""Recordings that are kept to be tried again. Each holds its events in memory."""

POLL_S = 0.2
"""Seconds of one wait. Python's handler of a signal that another thread has got runs between two of them."""

_REPORT_S = 10.0
"""Seconds that reporting given-up traces may take: the folder may be what hangs."""


class _Order:
    """One recording that is to be written."""

    def __init__(self, recording: Recording, name: Path | NameOf, renames: Mapping[str, str], on_done: OnDone) -> None:
        self.recording = recording
        self.name = name
        self.renames = renames
        self.on_done = on_done
        self.is_begun = False
        self.is_second_try = False
        self.is_given_up = False

    @property
    def label(self) -> str:
        return self.name.name if isinstance(self.name, Path) else "a trace without a name"

    def write(self) -> Written:
        path = self.name if isinstance(self.name, Path) else self.name()
        self.name = path
        return self.recording.write(path, self.renames)

    def report(self, written: Written | None, failure: BaseException | None) -> None:
        try:
            self.on_done(written, failure)
        except Exception:
            log.warning("the outcome of %s could not be recorded", self.label, exc_info=True)

    def may_be_tried_again(self, failure: BaseException | None) -> bool:
        is_of_the_system = isinstance(failure, OSError) and not isinstance(failure, FileExistsError)
        return is_of_the_system and not self.is_second_try and not self.is_given_up


class Writer:
    """A queue of recordings, and one thread that lives while the queue holds any.

    An interpreter that ends normally waits for the thread, so no trace is lost. A forked child starts with an empty
    queue: the parent writes what was in it.
    """

    _unfinished: list[_Order]
    _failed: list[_Order]
    """Could not be written, and may be tried again."""
    _finished: int
    """Orders that came to an end, well or not."""
    _thread: threading.Thread | None
    """Writes what is unfinished; None: none does."""

    def __init__(self) -> None:
        self._reset()
        _writers.add(self)

    def submit(self, recording: Recording, name: Path | NameOf, renames: Mapping[str, str], on_done: OnDone) -> None:
        """Have `recording.write(path, renames)` called soon. Returns at once and raises nothing.

        Args:
            recording: written once, or twice where the first time fails; then released.
            name: the trace without its suffix, in a folder that exists; or a function that makes it.
            renames: see `Recording.write`.
            on_done: gets the outcome; an error that it raises is logged.
        """
        self._after_fork()
        _wait_at_exit()
        with self._changed:
            self._unfinished.append(_Order(recording, name, renames, on_done))
        self._have_it_written()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted is on disk and reported.

        Args:
            timeout: in seconds; None: as long as it takes.

        Returns:
            Whether everything is done. Always false within `on_done`, which would wait for itself.
        """
        self._after_fork()
        if self._is_writer_thread():
            return False
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._unfinished:
                left = POLL_S if end is None else min(POLL_S, end - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def finish(self, timeout: float | None = None) -> bool:
        """Wait as `flush` does, try again what could not be written, and wait for that too."""
        return self.flush(timeout) and (not self._try_again() or self.flush(timeout))

    def finish_or_give_up(self, every: float = LOG_EVERY_S, patience_s: float = PATIENCE_S) -> None:
        """Wait as `finish` does, and give up what does not come to an end. Says in the log that it waits.

        Args:
            every: seconds after which that is logged, again and again.
            patience_s: seconds without a finished trace after which those that are left are given up.

        Raises:
            KeyboardInterrupt: Ctrl-C came, and what was not written is given up.
        """
        if self._is_writer_thread():
            return
        try:
            self._await_end(every, patience_s)
            if self._try_again():
                self._await_end(every, patience_s)
        except KeyboardInterrupt:
            self._give_up("Ctrl-C came while the end of the job waited for it")
            raise

    @property
    def pending(self) -> int:
        """Recordings that are not on disk yet, the one being written included."""
        self._after_fork()
        return len(self._unfinished)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _have_it_written(self) -> None:
        """On a thread of its own; on this one where the process can start none any more."""
        with self._changed:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="verl-profiler-writer", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = threading.current_thread()
            else:
                return
        self._work()

    def _work(self) -> None:
        while (order := self._next()) is not None:
            written: Written | None = None
            failure: BaseException | None = None
            try:
                written = order.write()
            except BaseException as error:
                failure = error
            if written is not None or not order.is_given_up:
                order.report(written, failure)
            self._close(order, failure)

    def _next(self) -> _Order | None:
        """What this thread is to write. None: nothing is left, or another thread took its place."""
        with self._changed:
            if not self._is_writer_thread():
                return None
            for order in self._unfinished:
                if not order.is_begun:
                    order.is_begun = True
                    return order
            self._thread = None
            return None

    def _close(self, order: _Order, failure: BaseException | None) -> None:
        with self._changed:
            self._finished += 1
            if order in self._unfinished:
                self._unfinished.remove(order)
            if order.may_be_tried_again(failure) and len(self._failed) < MOST_FAILED:
                self._failed.append(order)
            self._changed.notify_all()

    def _is_writer_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # -- the end ------------------------------------------------------------------------------------------------------

    def _try_again(self) -> bool:
        """Put what could not be written into the queue once more. Returns whether there was anything."""
        with self._changed:
            again, self._failed = self._failed, []
            for order in again:
                order.is_begun, order.is_second_try = False, True
            self._unfinished += again
        if again:
            self._have_it_written()
        return bool(again)

    def _await_end(self, every: float, patience_s: float) -> None:
        finished, since = self._finished, time.monotonic()
        while not self.flush(min(every, patience_s)):
            now = time.monotonic()
            if self._finished != finished:
                finished, since = self._finished, now
            elif now - since >= patience_s:
                self._give_up(f"it did not come to an end within {patience_s:.0f} s at the end of the job")
                return
            log.warning("waiting for traces that are still being written: %d; Ctrl-C gives them up", self.pending)

    def _give_up(self, why: str) -> None:
        """Wait no longer for what is not written. If it is written all the same, that is recorded then."""
        with self._changed:
            lost, self._unfinished, self._failed, self._thread = self._unfinished, [], [], None
            for order in lost:
                order.is_given_up = True
        if not lost:
            return
        end_without_exit_handlers()  # the thread may be in native code for ever, and use what they take down
        reporting = threading.Thread(target=_report_given_up, args=(lost, why), daemon=True)
        reporting.start()
        reporting.join(_REPORT_S)

    # -- forks --------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())  # a signal handler may come back to it
        self._unfinished = []
        self._failed = []
        self._finished = 0
        self._thread = None

    def _after_fork(self) -> None:
        # Asked before the lock is used: another thread may have held it when the process forked.
        if self._pid != os.getpid():
            self._reset()


def _report_given_up(lost: list[_Order], why: str) -> None:
    for order in lost:
        order.report(None, TimeoutError(f"given up: {why}"))


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
_default: Writer | None = None


def default_writer() -> Writer:
    """The writer that the sessions of this process share."""
    global _default
    if _default is None:
        _default = Writer()
    return _default


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(_drain_all)


def _drain_all() -> None:
    for writer in tuple(_writers):
        try:
            writer.finish_or_give_up()
        except KeyboardInterrupt:
            log.warning("Ctrl-C: the process ends without the traces that were not written")
