"""The recorder of a process: which loop may record, on which thread, and that no recording stays on.

A process has one device profiler, and torch's profiler records the thread that started it. The rules:

- Each loop (a `generate` call, a decode loop, an engine worker) has a session: its gate, its lead, its own thread.
- The recorder is leased to one session at a time, from the opening of a window to its end. Another session that reaches
  a window meanwhile does not capture it. An `Arming`, which the loops of an engine share, counts the captures that are
  still wanted.
- A recording begins and ends on the thread of its loop. Another thread (job end, SIGTERM, stop_profile) asks for the
  end, and waits for the loop's next begin or end of an iteration. That wait is bounded, and a log line says when it was
  in vain.
- Iterations of other loops during a capture are counted. One that runs on the same thread while a captured iteration
  is under way interrupts the range of that iteration, so that a range holds its own iteration only.
- A loop that changes its thread leaves one part for each iteration, since a part has to end on the thread it began on.
- Another profiler that is prepared in the process comes first: the recording ends before it, and the rest of the window
  becomes a further part.
- An exception or Ctrl-C while a recording begins or ends leaves it off. Signal handlers wait until that is done.
- In a forked child every session is dead and the profiler is off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol


class Loop(Protocol):
    """A session, as far as the recorder knows it."""

    iteration: int
    thread: threading.Thread | None
    """The thread of its last iteration, of a loop in the job's own process."""

    @property
    def recording(self) -> Interruptible | None:
        """Its capture, while one is open."""
        ...

    def step_aside(self) -> None:
        """Another profiler is about to be prepared in this process."""
        ...


class OnThread(Protocol):
    """A recording, as far as the recorder knows it."""

    thread: threading.Thread

    @property
    def is_on_this_thread(self) -> bool:
        """Whether it can end on the calling thread."""
        ...


class Interruptible(OnThread, Protocol):
    """An open capture, whose ranges must not hold iterations of other loops."""

    def interrupt(self, by: object) -> None:
        """An iteration of another loop begins on this thread."""
        ...

    def resume(self, by: object) -> None:
        """That iteration has ended."""
        ...


class Recorder:
    """Lends the device profiler to one loop at a time, and counts the iterations of the others meanwhile."""

    def __init__(self) -> None:
        self.has_recorded = False
        """Whether anything was ever recorded in this process."""
        self.workers: Callable[[], Iterable[Loop]] = tuple
        """The engine workers of this process. They count their iterations themselves."""
        self.reset()

    def reset(self) -> None:
        """Forget everything: this process has just been forked, so nobody holds the recorder and nothing runs."""
        self._lock = threading.RLock()
        self.holder: Loop | None = None
        self._running: set[Loop] = set()
        """Loops of the job's own process whose iteration is under way."""
        self._begun_meanwhile = 0
        self._workers_before: list[tuple[Loop, int]] = []
        self._left_on_threads: list[tuple[OnThread, Callable[[], None], Callable[[], None]]] = []
        """Recordings whose loop has moved to another thread, with what to do about each; see `leave_on_thread`."""

    def lease(self, loop: Loop) -> bool:
        """Lend the recorder until it is given back. False: another loop has it."""
        with self._lock:
            if self.holder is None:
                self.holder = loop
            return self.holder is loop

    def give_back(self, loop: Loop) -> None:
        """The loop needs the recorder no longer. Harmless when it does not have it."""
        with self._lock:
            if self.holder is loop:
                self.holder = None

    # -- iterations of others ---------------------------------------------------------------------------------------

    def iteration_begins(self, loop: Loop) -> None:
        """An iteration of a loop in the job's own process begins. Engine workers do not call this."""
        if self._left_on_threads:
            self._end_what_was_left()
        self._running.add(loop)
        holder = self.holder
        if holder is not None and holder is not loop:
            with self._lock:
                self._begun_meanwhile += 1
            capture = holder.recording
            if capture is not None and capture.is_on_this_thread:
                capture.interrupt(loop)

    def iteration_ends(self, loop: Loop) -> None:
        """The iteration has ended."""
        self._running.discard(loop)
        holder = self.holder
        if holder is not None and holder is not loop:
            capture = holder.recording
            if capture is not None and capture.is_on_this_thread:
                capture.resume(loop)

    def others_on_this_thread(self, loop: Loop) -> bool:
        """Whether an iteration of another loop is under way on the calling thread, as asyncio tasks can have it."""
        here = threading.current_thread()
        return any(other.thread is here for other in tuple(self._running) if other is not loop)

    def count_others_from_here(self, loop: Loop) -> None:
        """A capture of `loop` begins."""
        with self._lock:
            self._begun_meanwhile = len(self._running - {loop})
            self._workers_before = [(worker, worker.iteration) for worker in self.workers() if worker is not loop]

    def others_until_here(self) -> int:
        """How many iterations of other loops have run since the capture began, wholly or in part."""
        with self._lock:
            return self._begun_meanwhile + sum(worker.iteration - before for worker, before in self._workers_before)

    # -- loops that change their thread -------------------------------------------------------------------------------

    def leave_on_thread(self, recording: OnThread, end: Callable[[], None], report_lost: Callable[[], None]) -> None:
        """Keep a recording whose loop has moved to another thread.

        Args:
            recording: on a thread that no longer runs the loop.
            end: called on that thread when it begins an iteration of any loop.
            report_lost: called when the thread has ended.
        """
        self._left_on_threads.append((recording, end, report_lost))
        self._end_what_was_left()

    def _end_what_was_left(self) -> None:
        for entry in tuple(self._left_on_threads):
            recording, end, report_lost = entry
            if recording.is_on_this_thread or not recording.thread.is_alive():
                self._left_on_threads.remove(entry)
                (end if recording.is_on_this_thread else report_lost)()


recorder = Recorder()
"""The recorder of this process."""
