"""How many captures of each window are still wanted. The gates of several loops can share one quota."""

from __future__ import annotations

import threading


class CaptureQuota:
    """Counts the captures of each window since arming. Safe to use from several threads.

    A capture is claimed when it opens. From then on it is either counted, or given back because it came to nothing.
    The first times that a window would be captured, it goes by instead, and these are claimed and counted likewise.

    Args:
        windows: how many windows there are.
        max_captures: wanted of each window; None: no limit.
        skip_captures: how many times each window goes by first.

    Attributes:
        wanted: indices of the windows of which captures are still wanted, ascending. A new tuple at each change, so
            that a gate can read it at any time without a lock.
        changes: rises when a window becomes wanted again.
    """

    def __init__(self, windows: int, max_captures: int | None = 1, skip_captures: int = 0) -> None:
        self._max_captures = max_captures
        self._skip_captures = skip_captures
        self._lock = threading.Lock()
        self._windows = windows
        self.changes = 0
        self.reset()

    def reset(self) -> None:
        """All windows are wanted again, because a new arming begins."""
        with self._lock:
            self._counted = [0] * self._windows
            self._claimed = [0] * self._windows
            self._skipped = [0] * self._windows
            self._skipping = [0] * self._windows
            self.changes += 1
            self._update()

    def claim_skip(self, index: int) -> bool:
        """Claim one of the times that a window goes by. False: it has gone by often enough, or is about to have."""
        with self._lock:
            if not self.skips_next(index):
                return False
            self._skipping[index] += 1
            return True

    def skips_next(self, index: int) -> bool:
        """Whether a window would go by if it came now."""
        return self._skipped[index] + self._skipping[index] < self._skip_captures

    def count_skip(self, index: int) -> None:
        """A window has gone by, as claimed."""
        with self._lock:
            self._skipping[index] -= 1
            self._skipped[index] += 1

    def give_back_skip(self, index: int) -> None:
        """The window was not reached after all."""
        with self._lock:
            self._skipping[index] -= 1

    def skipped(self, index: int) -> int:
        """How many times a window has gone by."""
        return self._skipped[index]

    def claim(self, index: int) -> bool:
        """Claim a capture of a window. False: none is wanted, or other loops are making the last ones."""
        with self._lock:
            under_way = self._counted[index] + self._claimed[index]
            if self._max_captures is not None and under_way >= self._max_captures:
                return False
            self._claimed[index] += 1
            return True

    def count(self, index: int) -> None:
        """A claimed capture is complete."""
        with self._lock:
            self._claimed[index] -= 1
            self._counted[index] += 1
            self._update()

    def give_back(self, index: int) -> None:
        """A claimed capture holds nothing of its window."""
        with self._lock:
            self._claimed[index] -= 1

    def uncount(self, index: int) -> None:
        """A counted capture turned out to be empty: the window is wanted again."""
        with self._lock:
            self._counted[index] -= 1
            self.changes += 1
            self._update()

    @property
    def untouched(self) -> tuple[int, ...]:
        """Indices of the windows of which there is no capture, and none is under way."""
        with self._lock:
            return tuple(
                index for index in range(self._windows) if not self._counted[index] and not self._claimed[index]
            )

    def _update(self) -> None:
        self.wanted = tuple(
            index
            for index in range(self._windows)
            if self._max_captures is None or self._counted[index] < self._max_captures
        )
