"""What every gate shares: arming, the count of captures per window, and the caps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from verl_profiler_conf.core.gate.verdict import NO_ACTION, NONE_FINISHED, Batch, CloseReason, Finished, Verdict
from verl_profiler_conf.core.window import TokenWindow

MAX_GAP = 8
"""Consecutive iterations without a token of the lead over which a capture stays open. A preempted request usually comes
back within a few; a longer pause would fill the trace with other requests' work."""


class Gate(ABC):
    """A state machine over iterations. Fed with `step` before each one; everything else is arming and the end.

    Args:
        windows: ascending, disjoint.
        max_iterations: cap on captured iterations of one capture; None: no cap.
        max_captures: captures of each window per arming; None: no limit.
        armed: False waits for `arm()`, as `arm: request` does.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        max_iterations: int | None = None,
        max_captures: int | None = 1,
        armed: bool = True,
    ) -> None:
        self.windows = tuple(windows)
        self.max_iterations = max_iterations
        self.max_captures = max_captures
        self.armed = False
        self.is_open = False
        self._target = -1
        """Index of the window that is open or waited for; -1: none."""
        self._taken = 0
        """Iterations in the capture so far, all its parts and gaps."""
        self._captures = [0] * len(self.windows)
        self._pending: list[int] = []
        self._reset()
        if armed:
            self.arm()

    @property
    @abstractmethod
    def furthest(self) -> int:
        """Highest response token index that a tracked request has made since arming, -1 for none."""

    @property
    def headroom(self) -> int:
        """Tokens that each request can still make before the answer could be anything but NO_ACTION.

        It holds while no request comes or goes; 0 when it is not known. A caller that knows how many tokens an
        iteration makes at most need not ask before each iteration.
        """
        return 0

    @abstractmethod
    def _reset(self) -> None:
        """Forget every request: a new arming begins."""

    @abstractmethod
    def _step(self, batch: Batch, finished: Finished) -> Verdict: ...

    @abstractmethod
    def _on_idle(self, finished: Finished) -> Verdict: ...

    def step(self, batch: Batch, finished: Finished = NONE_FINISHED) -> Verdict:
        """Answer for the iteration that is about to run `batch`; `finished` since the iteration before."""
        return self._step(batch, finished) if self.armed else NO_ACTION

    def idle(self, finished: Finished = NONE_FINISHED) -> Verdict:
        """The engine has nothing left to run: every request has ended, also those not named in `finished`."""
        return self._on_idle(finished) if self.armed else NO_ACTION

    def arm(self) -> None:
        """Wait for the windows anew, all of them. An open capture is left alone: its arming goes on."""
        if self.is_open:
            return
        self.armed = bool(self.windows)
        self._target = -1
        self._taken = 0
        self._captures = [0] * len(self.windows)
        self._pending = list(range(len(self.windows)))
        self._reset()

    def disarm(self, reason: CloseReason = "stop_profile") -> Verdict:
        """Stop waiting; nothing fires later. Closes what is open, gives its reason."""
        verdict = Verdict(close=reason) if self.is_open else NO_ACTION
        if self._taken:
            self._captures[self._target] += 1
            self._taken = 0
        self.armed = self.is_open = False
        return verdict

    @property
    def unreached(self) -> tuple[TokenWindow, ...]:
        """Windows of which this arming has captured nothing yet."""
        under_way = self._target if self._taken else -1
        return tuple(
            window for index, window in enumerate(self.windows) if self._captures[index] == 0 and index != under_way
        )

    def _capped(self) -> bool:
        return self.max_iterations is not None and self._taken >= self.max_iterations

    def _capture_done(self) -> None:
        """The capture of the target is complete; disarm when no window is left to capture."""
        index = self._target
        self.is_open = False
        self._target = -1
        self._taken = 0
        self._captures[index] += 1
        if self.max_captures is not None and self._captures[index] >= self.max_captures:
            self._pending.remove(index)
            self.armed = bool(self._pending)
