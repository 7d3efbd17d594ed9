"""One capture while it is open: its rows, and the ranges that name them in the trace."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from verl_profiler_conf.capture.backends import DeviceProfiler
from verl_profiler_conf.capture.manifest import IterationRecord
from verl_profiler_conf.capture.ranges import range_name
from verl_profiler_conf.core.gate import Batch, Opening, RecordedIteration


class OpenCapture:
    """Rows in the order they ran. `profiler` is recording from here on, until its owner stops it."""

    def __init__(self, opening: Opening, profiler: DeviceProfiler) -> None:
        self.window = opening.window
        self.part = opening.part
        self.profiler = profiler
        self.rows: list[IterationRecord] = []
        self.opening_stall_ns = 0
        self.stall_ns = 0
        self._names: list[str] = []
        self._range: AbstractContextManager[None] | None = None
        self._entered_ns = 0

    @property
    def tracked(self) -> list[str]:
        """Ids of the requests whose tokens were followed, in order of appearance."""
        return list(dict.fromkeys(row.request for row in self.rows if row.request))

    @property
    def renames(self) -> dict[str, str]:
        """Names that ranges bear in the recording -> those they should, where speculation made fewer tokens."""
        pairs = ((name, range_name(row)) for name, row in zip(self._names, self.rows, strict=True))
        return {name: real for name, real in pairs if name != real}

    def enter(self, row: RecordedIteration, iteration: int, batch: Batch) -> None:
        """The iteration begins."""
        tokens = sum(len(made) for made in batch.values())
        entry = IterationRecord(iteration, row.lo, row.hi, len(batch), tokens, 0, row.gap, row.request)
        self.rows.append(entry)
        self._names.append(range_name(entry))
        self._range = self.profiler.annotate(self._names[-1])
        self._range.__enter__()
        self._entered_ns = time.perf_counter_ns()

    def leave(self) -> None:
        """The iteration has ended. Without effect outside one."""
        if self._range is None:
            return
        self.rows[-1].wall_ns = time.perf_counter_ns() - self._entered_ns
        entered, self._range = self._range, None
        entered.__exit__(None, None, None)

    def settle(self, hi: int) -> None:
        """The last row that made tokens really ended at `hi`, below its upper bound."""
        row = next((row for row in reversed(self.rows) if not row.gap), None)
        if row is not None:
            row.tokens -= row.hi - hi
            row.hi = hi
            row.gap = not self.window.overlaps(row.lo, hi)

    def discard(self) -> None:
        """Nothing of the window is in it."""
        self.leave()
        self.profiler.discard()
