"""Traces leave the rollout's thread here: one worker writes them, one after the other.

The worker has the priority of any other thread, on purpose: a thread of low priority that is not let run while it holds
Python's lock stops everybody else, and measured on busy cores it did (exports 20 times as long, iterations stalled for
seconds).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_profiler_conf.capture.backends.base import Recording, Written

log = logging.getLogger(__name__)

OnDone = Callable[[Written | None, BaseException | None], None]
"""Called on the writer's thread with what was written, or with why it was not."""


@dataclass(frozen=True)
class _Order:
    recording: Recording
    path: Path
    renames: Mapping[str, str]
    on_done: OnDone


class Writer:
    """A queue and a thread that lives while there is something in it.

    The thread is no daemon, so an interpreter that ends waits for it: no trace is lost on a normal exit. In a fork the
    queue begins empty, since what was in it is the parent's to write.
    """

    def __init__(self) -> None:
        self._worker: threading.Thread | None = None
        self._reset()

    def submit(self, recording: Recording, path: Path, renames: Mapping[str, str], on_done: OnDone) -> None:
        """Have `recording.write(path, renames)` called soon. Returns at once, raises nothing.

        Args:
            recording: written once, then let go.
            path: the trace without its suffix; the folder exists.
            renames: see `Recording.write`.
            on_done: gets the outcome; what it raises is logged.
        """
        self._after_fork()
        with self._changed:
            self._orders.append(_Order(recording, path, renames, on_done))
            if self._worker is not None:
                return
            worker = threading.Thread(target=self._work, name="verl-profiler-writer", daemon=False)
            self._worker = worker
        try:
            worker.start()
        except RuntimeError:  # the interpreter is going down and gives out no more threads
            self._work()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted is on disk and reported.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Whether all is done.
        """
        self._after_fork()
        if threading.current_thread() is self._worker:
            return False  # asked from within `on_done`: waiting for oneself has no end
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            return self._changed.wait_for(
                lambda: self._worker is None, None if end is None else max(0.0, end - time.monotonic())
            )

    def drain(self, every: float = 30.0) -> None:
        """`flush` without a limit, as a job ends: a trace that was taken is not lost. Says that it waits.

        Args:
            every: seconds after which that is said, and said again.
        """
        while threading.current_thread() is not self._worker and not self.flush(every):
            log.warning("waiting for traces that are still being written: %d", self.pending)

    @property
    def pending(self) -> int:
        """Recordings not yet on disk, the one being written included."""
        self._after_fork()
        with self._changed:
            return len(self._orders) + self._busy

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = 0
                if not self._orders:
                    self._worker = None
                    self._changed.notify_all()
                    return
                order = self._orders.popleft()
                self._busy = 1
            _carry_out(order)
            del order  # a recording can be large

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._orders: deque[_Order] = deque()
        self._changed = threading.Condition()
        self._worker = None
        self._busy = 0

    def _after_fork(self) -> None:
        # checked before the lock is touched: another thread may have held it when the process forked
        if self._pid != os.getpid():
            self._reset()


def _carry_out(order: _Order) -> None:
    written: Written | None = None
    failure: BaseException | None = None
    try:
        written = order.recording.write(order.path, order.renames)
    except BaseException as error:
        failure = error
    try:
        order.on_done(written, failure)
    except Exception:
        log.warning("the outcome of %s could not be recorded", order.path.name, exc_info=True)


_default: Writer | None = None


def default_writer() -> Writer:
    """The writer that the sessions of this process share."""
    global _default
    if _default is None:
        _default = Writer()
    return _default
