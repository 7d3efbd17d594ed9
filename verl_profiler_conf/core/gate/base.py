"""What all gates share: arming, counting the captures of each window, and the limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from verl_profiler_conf.core.gate.quota import CaptureQuota
from verl_profiler_conf.core.gate.verdict import (
    NO_ACTION,
    NONE_FINISHED,
    PREPARE,
    Batch,
    CloseReason,
    Finished,
    Verdict,
)
from verl_profiler_conf.core.window import TokenWindow

MAX_GAP = 8
"""A capture stays open over so many iterations in a row without a token of the lead. A preempted request usually
returns within a few. A longer pause would fill the trace with the work of other requests."""


class Gate(ABC):
    """Decides before each iteration (`step`) whether it is captured.

    Args:
        windows: ascending, disjoint.
        max_iterations: cap on captured iterations of one capture; None: no cap.
        max_captures: captures of each window per arming; None: no limit.
        skip_captures: how many times each window goes by uncaptured first, per arming. It goes by whenever it would
            have been captured, for as long as that capture would have lasted.
        armed: False waits for `arm()`, as `arm: request` does.
        quota: shared with the gates of other loops, which then take the same windows in turn; None: a quota of its own.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        max_iterations: int | None = None,
        max_captures: int | None = 1,
        skip_captures: int = 0,
        armed: bool = True,
        quota: CaptureQuota | None = None,
    ) -> None:
        self.windows = tuple(windows)
        self.max_iterations = max_iterations
        self.quota = quota or CaptureQuota(len(self.windows), max_captures, skip_captures)
        self._shares_quota = quota is not None
        self.may_record: Callable[[TokenWindow], bool] = _always
        """Asked before a capture opens. False: nothing can record now, and this window goes by."""
        self.armed = armed and bool(self.quota.wanted)
        self.is_open = False
        """Whether the target window is being captured, or goes by."""
        self._skips = False
        """Whether the target window goes by. Holds until a window opens again."""
        self._target = -1
        """Index of the window that is open or waited for; -1: none."""
        self._recorded = 0
        """Iterations recorded of the target window so far, gaps and earlier parts included."""
        self._reset()

    @property
    @abstractmethod
    def furthest(self) -> int:
        """Highest response token index that a tracked request has made since arming, -1 where none was made."""

    @property
    @abstractmethod
    def headroom(self) -> int:
        """Tokens that each request can make before a step could answer anything but NO_ACTION; 0: not known.

        Valid whoever comes or goes, with two exceptions: a request that comes and has tokens already, and the end of
        the request that the gate follows (`track: lead`), which is the only one that it asks about. A caller that
        knows how many tokens an iteration makes at most can skip as many steps.
        """

    def why_unreached(self, window: TokenWindow) -> str | None:  # noqa: ARG002 - gates of one request have no answer
        """Why nothing of a window was captured, where the furthest token does not tell; None: it does."""
        return None

    def coverage(self, window: TokenWindow) -> tuple[int, int] | None:  # noqa: ARG002 - one request is followed whole
        """How many of the window's tokens are in captures of this arming, and how many of them there are.

        Each request's tokens count by themselves. A request that still runs counts as one that makes all of them. None
        where the tokens of one request count alone, or where the window has no end.
        """
        return None

    @abstractmethod
    def _reset(self) -> None:
        """Forget all requests, because a new arming begins."""

    @abstractmethod
    def _step(self, batch: Batch, finished: Finished) -> Verdict: ...

    @abstractmethod
    def _on_idle(self, finished: Finished) -> Verdict: ...

    def step(self, batch: Batch, finished: Finished = NONE_FINISHED) -> Verdict:
        """Answer for the iteration that is about to run `batch`; `finished` since the iteration before."""
        if not self.armed:
            return NO_ACTION
        skipped_before = self._skips
        verdict = self._step(batch, finished)
        if verdict is not NO_ACTION and (skipped_before or self._skips):
            return _without_skipped(verdict, before=skipped_before, now=self._skips)
        return verdict

    def idle(self, finished: Finished = NONE_FINISHED) -> Verdict:
        """The engine has nothing left to run: all requests have ended, named in `finished` or not."""
        if not self.armed:
            return NO_ACTION
        verdict = self._on_idle(finished)
        return NO_ACTION if self._skips else verdict

    @property
    def is_capturing(self) -> bool:
        """Whether a capture is open."""
        return self.is_open and not self._skips

    def skipped(self, window: TokenWindow) -> int:
        """How many times a window has gone by since arming, as `skip_captures` asks."""
        return self.quota.skipped(self.windows.index(window))

    def arm(self) -> None:
        """Wait for all windows again. While a capture is open nothing changes: its arming continues."""
        if self.is_capturing:
            return
        self.is_open = self._skips = False
        self.quota.reset()
        self.armed = bool(self.windows)
        self._target = -1
        self._recorded = 0
        self._reset()

    def disarm(self, reason: CloseReason = "stop_profile") -> Verdict:
        """Stop waiting. The verdict closes the open capture, for `reason`."""
        verdict = Verdict(close=reason) if self.is_capturing else NO_ACTION
        if self._recorded:
            self._count()
            self._recorded = 0
        self.armed = self.is_open = False
        return verdict

    def wait_again(self, window: TokenWindow) -> None:
        """The last capture of `window` is empty, because nothing could record: wait for the window again."""
        self.quota.uncount(self.windows.index(window))
        self.armed = True

    @property
    def unreached(self) -> tuple[TokenWindow, ...]:
        """Windows of which nothing has been captured since arming."""
        return tuple(self.windows[index] for index in self.quota.untouched)

    def _at_cap(self) -> bool:
        return self.max_iterations is not None and self._recorded >= self.max_iterations

    def _claim(self, index: int) -> bool:
        """Claim a capture of a window that is about to open, or one of the times that it goes by."""
        self._skips = self.quota.claim_skip(index)
        if self._skips:
            return True
        if not self.quota.claim(index):
            return False
        if not self.may_record(self.windows[index]):
            self.quota.give_back(index)
            return False
        return True

    def _count_capture(self) -> None:
        """The capture of the target window is complete. Disarm when no window is left for this loop or another."""
        self._count()
        self._end_capture()
        # A shared window can be wanted again, when the capture of another loop turns out to be empty.
        self.armed = self._shares_quota or bool(self.quota.wanted)

    def _drop_capture(self) -> None:
        """The capture under way holds nothing of its window."""
        if self._skips:
            self.quota.give_back_skip(self._target)
        else:
            self.quota.give_back(self._target)
        self._end_capture()

    def _count(self) -> None:
        if self._skips:
            self.quota.count_skip(self._target)
        else:
            self.quota.count(self._target)

    def _end_capture(self) -> None:
        self.is_open = False
        self._target = -1
        self._recorded = 0


def _without_skipped(verdict: Verdict, *, before: bool, now: bool) -> Verdict:
    """A verdict without what it says of a window that goes by.

    Args:
        verdict: as if everything were captured.
        before: the window that was open before the iteration, if any, goes by.
        now: the window that is open in the iteration, if any, goes by.
    """
    if before:
        verdict = replace(verdict, settled=None, discard=False, close=None)
    if now:
        verdict = replace(verdict, open=None, iteration=None, close_after=None)
    return NO_ACTION if verdict == NO_ACTION else PREPARE if verdict == PREPARE else verdict


def _always(_: TokenWindow) -> bool:
    return True
