"""One capture while it is open: its rows, and the ranges that name its iterations in the trace."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import AbstractContextManager

from verl_profiler_conf.capture.backends import DeviceProfiler, Recording
from verl_profiler_conf.capture.manifest import IterationRecord
from verl_profiler_conf.capture.ranges import range_name
from verl_profiler_conf.capture.torch_state import own_profiler, turn_off
from verl_profiler_conf.core.gate import Batch, RecordedIteration
from verl_profiler_conf.core.window import TokenWindow


class OpenCapture:
    """One capture, from the begin of its recording to `end` or `discard`.

    Args:
        window: response tokens asked for.
        part: 1, 2, ... of the window's capture.
        profiler: started here. If that fails, it is off again.
    """

    def __init__(self, window: TokenWindow, part: int, profiler: DeviceProfiler) -> None:
        self.window = window
        self.part = part
        self.profiler = profiler
        self.thread = threading.current_thread()
        self.rows: list[IterationRecord] = []
        self.opening_stall_ns = 0
        self.closing_since_ns = 0
        """When the rollout began to wait for the end of the recording, by `time.perf_counter_ns`."""
        self.coverage: tuple[int, int] | None = None
        self.other_iterations = 0
        self.notes: list[str] = []
        self.interrupted_ranges = 0
        """Iterations during which another loop ran an iteration on this thread. Each has several ranges."""
        self.mixed_ranges = 0
        """Iterations that began while one of another loop was under way on this thread."""
        self._names: list[str] = []
        self._is_in_iteration = False
        self._range: AbstractContextManager[None] | None = None
        self._interrupted_by: set[object] = set()
        self._entered_ns = 0
        with own_profiler():
            try:
                profiler.start()
            except BaseException:
                self._turn_off()
                raise

    @property
    def is_on_this_thread(self) -> bool:
        """Whether the recording began on the calling thread, and so can end on it."""
        return self.thread is threading.current_thread()

    @property
    def tracked(self) -> list[str]:
        """Ids of the requests whose tokens were followed, each once, in the order in which they ran."""
        return list(dict.fromkeys(row.request for row in self.rows if row.request))

    @property
    def renames(self) -> dict[str, str]:
        """Range name in the recording -> the right name, where speculation made fewer tokens than its bound."""
        pairs = ((name, range_name(row)) for name, row in zip(self._names, self.rows, strict=True))
        return {name: real for name, real in pairs if name != real}

    # -- iterations ---------------------------------------------------------------------------------------------------

    def enter(self, row: RecordedIteration, iteration: int, batch: Batch) -> None:
        """An iteration begins."""
        tokens = sum(len(made) for made in batch.values())
        entry = IterationRecord(iteration, row.lo, row.hi, len(batch), tokens, 0, row.gap, row.request)
        self.rows.append(entry)
        self._names.append(range_name(entry))
        self._is_in_iteration = True
        self._interrupted_by.clear()
        self._open_range()
        self._entered_ns = time.perf_counter_ns()

    def leave(self) -> None:
        """The iteration has ended. Outside an iteration nothing happens."""
        if not self._is_in_iteration:
            return
        self.rows[-1].wall_ns = time.perf_counter_ns() - self._entered_ns
        self._is_in_iteration = False
        self._close_range()

    def interrupt(self, by: object) -> None:
        """An iteration of another loop begins on this thread: the range of the iteration under way ends before it."""
        if self._is_in_iteration:
            self.interrupted_ranges += not self._interrupted_by
            self._interrupted_by.add(by)
            self._close_range()

    def resume(self, by: object) -> None:
        """The other iteration has ended: the rest of the iteration under way is in a further range."""
        if by in self._interrupted_by:
            self._interrupted_by.remove(by)
            if self._is_in_iteration and not self._interrupted_by:
                self._open_range()

    def fail_iteration(self) -> None:
        """The iteration raised: it made no token. Outside an iteration nothing happens."""
        if self._is_in_iteration:  # also while another loop's iteration interrupts its range
            self.leave()
            row = self.rows[-1]
            row.hi, row.tokens, row.gap = row.lo, 0, True

    def settle(self, hi: int) -> None:
        """The last row that made tokens ended at `hi`, below its upper bound."""
        row = next((row for row in reversed(self.rows) if not row.gap), None)
        if row is not None:
            row.tokens -= row.hi - hi
            row.hi = hi
            row.gap = not self.window.overlaps(row.lo, hi)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> Recording:
        """End the recording. The device profiler is off afterwards, also where this raises."""
        self.leave()
        self.closing_since_ns = time.perf_counter_ns()
        with own_profiler():
            try:
                return self.profiler.stop()
            except BaseException:
                self._turn_off()
                raise

    def discard(self) -> None:
        """Throw the recording away."""
        self.leave()
        with own_profiler():
            try:
                self.profiler.discard()
            except BaseException:
                self._turn_off()
                raise

    def _turn_off(self) -> None:
        with contextlib.suppress(BaseException):  # the failure that led here is raised
            self.profiler.discard()
        turn_off()

    def _open_range(self) -> None:
        self._range = self.profiler.annotate(self._names[-1])
        self._range.__enter__()

    def _close_range(self) -> None:
        entered, self._range = self._range, None
        if entered is not None:
            entered.__exit__(None, None, None)
