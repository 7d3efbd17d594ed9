"""Writes traces on a thread of its own, one after the other.

The thread has normal priority, on purpose. A thread of low priority that holds Python's lock and is not scheduled stops
all other threads: measured on busy cores, exports took 20 times as long and iterations stalled for seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from verl_profiler_conf.capture.backends.base import Recording, Written

log = logging.getLogger(__name__)

OnDone = Callable[[Written | None, BaseException | None], None]
"""Called on the writer's thread, with what was written or with the error."""


class Writer:
    """A queue of recordings, and one thread that lives while the queue holds any.

    An interpreter that ends normally waits for the thread, so no trace is lost. A forked child starts with an empty
    queue: the parent writes what was in it.
    """

    _executor: ThreadPoolExecutor | None

    def __init__(self) -> None:
        self._reset()

    def submit(self, recording: Recording, path: Path, renames: Mapping[str, str], on_done: OnDone) -> None:
        """Have `recording.write(path, renames)` called soon. Returns at once and raises nothing.

        Args:
            recording: written once, then released.
            path: the trace without its suffix; the folder exists.
            renames: see `Recording.write`.
            on_done: gets the outcome; an error that it raises is logged.
        """
        self._after_fork()
        future: Future[None] | None = None
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verl-profiler-writer")
            try:
                future = self._executor.submit(self._write, recording, path, renames, on_done)
            except RuntimeError:  # the process can start no thread any more, for instance while it ends
                self._executor = None
            else:
                self._unfinished.add(future)
        if future is None:
            self._write(recording, path, renames, on_done)
        else:
            future.add_done_callback(self._forget)

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
        while unfinished := tuple(self._unfinished):
            left = None if end is None else max(0.0, end - time.monotonic())
            done, not_done = wait(unfinished, left)
            for future in done:
                self._forget(future)
            if not_done:
                return False
        return True

    def drain(self, every: float = 30.0) -> None:
        """Wait as `flush` does, without a limit. Says in the log that it waits.

        Args:
            every: seconds after which that is logged, again and again.
        """
        while not self._is_writer_thread() and not self.flush(every):
            log.warning("waiting for traces that are still being written: %d", self.pending)

    @property
    def pending(self) -> int:
        """Recordings that are not on disk yet, the one being written included."""
        self._after_fork()
        return len(self._unfinished)

    def _write(self, recording: Recording, path: Path, renames: Mapping[str, str], on_done: OnDone) -> None:
        self._thread = threading.get_ident()
        written: Written | None = None
        failure: BaseException | None = None
        try:
            written = recording.write(path, renames)
        except BaseException as error:
            failure = error
        try:
            on_done(written, failure)
        except Exception:
            log.warning("the outcome of %s could not be recorded", path.name, exc_info=True)
        finally:
            self._thread = 0

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._unfinished.discard(future)
            if not self._unfinished and self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None

    def _is_writer_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._executor = None
        self._unfinished: set[Future[None]] = set()
        self._thread = 0
        """Identifies the thread that writes right now; 0: none does."""

    def _after_fork(self) -> None:
        # Asked before the lock is used: another thread may have held it when the process forked.
        if self._pid != os.getpid():
            self._reset()


_default: Writer | None = None


def default_writer() -> Writer:
    """The writer that the sessions of this process share."""
    global _default
    if _default is None:
        _default = Writer()
    return _default
