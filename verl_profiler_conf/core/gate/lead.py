"""`track: lead`: one request's tokens count. Constant cost per iteration while a lead is known."""

from __future__ import annotations

from verl_profiler_conf.core.gate.base import MAX_GAP, Gate
from verl_profiler_conf.core.gate.verdict import (
    NO_ACTION,
    NONE_FINISHED,
    PREPARE,
    Batch,
    CloseReason,
    Finished,
    Opening,
    RecordedIteration,
    Verdict,
)

PREPARE_AHEAD = 4
"""Tokens before its window at which the lead asks for the device profiler to be prepared. Attaching one to a GPU takes
some time, and its first records are disturbed by it; a profiler that waits for long costs each iteration a little."""

_NONE_MADE = range(0)


class LeadGate(Gate):
    """Follows the first request scheduled after arming through every window that is left.

    When it ends, or has passed all of them, the lead goes to the running request that is furthest along and has not
    passed the start of a window still to be captured; ties go to the one scheduled first, so that all ranks of an
    engine, which see the same schedule, choose alike.

    A capture whose lead paused too long is closed, but not complete: it is suspended until the lead makes tokens again,
    which are its next part.
    """

    def _reset(self) -> None:
        self._lead: str | None = None
        self._last = _NONE_MADE
        """The lead's range when it was last scheduled."""
        self._away = False
        """The lead is not in the iteration that was put to the gate last."""
        self._goal = -1
        """Nothing can change before the lead may make this token; -1 while open or suspended."""
        self._has_prepared = False
        """Whether the device profiler was asked to get ready for the target."""
        self._furthest = -1
        """Of earlier leads."""
        self._part = 0
        """Parts kept or open of the capture under way."""
        self._gaps = 0
        """Iterations in a row without a token of the lead, while open."""
        self._doubtful = False
        """Opened because the lead might reach the window; not told yet whether it did."""
        self._first = True
        self._passed: set[str] = set()
        """Requests that can capture nothing any more, so that waiting for an arrival costs no look at each."""

    @property
    def furthest(self) -> int:
        return max(self._furthest, self._certain - 1)

    @property
    def headroom(self) -> int:
        if self._lead is None or self._away or self.is_open:
            return 0
        return max(self._goal - self._last.stop, 0)

    @property
    def _certain(self) -> int:
        """Tokens that the lead has made for certain: an iteration that makes any makes one."""
        return self._last.start + bool(self._last)

    def step(self, batch: Batch, finished: Finished = NONE_FINISHED) -> Verdict:
        lead = self._lead
        if lead is not None and not finished:  # the answer of nearly every iteration, before anything else is asked
            made = batch.get(lead)
            if made is None:
                self._away = True
                if not self.is_open:
                    return NO_ACTION
            elif made.stop <= self._goal:
                self._away = False
                self._last = made
                return NO_ACTION
        verdict = super().step(batch, finished)
        self._away = self._lead is not None and batch.get(self._lead) is None
        return verdict

    def disarm(self, reason: CloseReason = "stop_profile") -> Verdict:
        self._goal = -1
        return super().disarm(reason)

    def _step(self, batch: Batch, finished: Finished) -> Verdict:
        """An iteration that may change something: the lead is new, gone, or near its window."""
        self._passed.difference_update(finished)
        before, made = NO_ACTION, None
        if self._lead is not None:
            made = batch.get(self._lead)
            if self._lead in finished:
                before = self._ended(finished[self._lead])
            elif made is not None:
                before = self._seen(made)
            elif self.is_open:
                before = self._unseen()
        if self.is_open:
            return self._take(before, made) if made else self._wait(before)
        if self._lead is None:
            made = self._choose(batch) if self.armed else None
        if not made:
            return before
        if self.windows[self._target].overlaps(made.start, made.stop):
            return self._open(before, made)
        if before is NO_ACTION and made.stop > self._goal and not self._taken:
            return self._prepare()
        return before

    def _on_idle(self, finished: Finished) -> Verdict:
        self._passed.clear()
        return NO_ACTION if self._lead is None else self._ended(finished.get(self._lead))

    # -- what is known now of the lead ------------------------------------------------------------------------------

    def _seen(self, made: range) -> Verdict:
        """The lead is scheduled: what its last iteration really made is told by where it goes on."""
        last, self._last = self._last, made
        token = made.start
        if not self._taken:
            self._aim(token)
            return NO_ACTION
        window = self.windows[self._target]
        settled = token if self.is_open and last.stop != token else None
        doubtful, self._doubtful = self._doubtful, False
        if doubtful and token <= window.start:
            return self._in_vain(settled, token)
        close: CloseReason | None = None
        if window.end is not None and token >= window.end:
            close = "window"
        elif self._capped():
            close = "max_iterations"
        elif self.is_open and not made and self._gaps >= MAX_GAP:
            self.is_open = False
            return Verdict(settled, close="gap")
        else:
            return Verdict(settled) if settled is not None else NO_ACTION
        was_open = self.is_open
        self._complete(token)
        return Verdict(settled, close=close) if was_open else NO_ACTION

    def _unseen(self) -> Verdict:
        """Open, and the lead is not scheduled: how far its last iteration came is not told yet."""
        window = self.windows[self._target]
        if window.end is not None and self._certain >= window.end:
            self._complete(self._certain)
            return Verdict(close="window")
        if self._capped():
            self._end_capped()
            return Verdict(close="max_iterations")
        if self._gaps >= MAX_GAP:
            self.is_open = False
            return Verdict(close="gap")
        return NO_ACTION

    def _ended(self, final: int | None) -> Verdict:
        """The lead has ended, after `final` tokens if that is known; its capture is as complete as it will be."""
        last, certain = self._last, self._certain
        count = certain if final is None else final
        self._furthest = max(self._furthest, count - 1)
        verdict = NO_ACTION
        if self._taken:
            window = self.windows[self._target]
            settled = final if self.is_open and final is not None and last.start <= final < last.stop else None
            if self._doubtful and final is not None and final <= window.start:
                verdict = self._in_vain(settled, final)
            else:
                if self.is_open:
                    reached = window.end is not None and count >= window.end
                    verdict = Verdict(settled, close="window" if reached else "request_end")
                self._capture_done()
        self._lead, self._last, self._goal, self._target, self._part = None, _NONE_MADE, -1, -1, 0
        self._doubtful = self._has_prepared = False
        return verdict

    def _prepare(self) -> Verdict:
        """The lead is close to its window: ask for the device profiler, once."""
        self._has_prepared = True
        self._goal = self.windows[self._target].start
        return PREPARE

    # -- the iteration ahead ----------------------------------------------------------------------------------------

    def _open(self, before: Verdict, made: range) -> Verdict:
        window = self.windows[self._target]
        self.is_open = True
        self._goal = -1
        self._part += 1
        self._doubtful = made.start < window.start
        return self._take(Verdict(before.settled, before.discard, before.close, Opening(window, self._part)), made)

    def _take(self, before: Verdict, made: range) -> Verdict:
        """Capture this iteration, in which the lead makes tokens."""
        window = self.windows[self._target]
        self._taken += 1
        self._gaps = 0
        recorded = RecordedIteration(made.start, made.stop, self._lead or "")
        close_after: CloseReason | None = None
        if len(made) == 1:  # exact: nothing more need be told
            if window.end is not None and made.stop >= window.end:
                close_after = "window"
            elif self._capped():
                close_after = "max_iterations"
        if close_after is not None:
            self._complete(made.stop)
        return Verdict(before.settled, before.discard, before.close, before.open, recorded, close_after)

    def _wait(self, before: Verdict) -> Verdict:
        """Capture this iteration, although the lead makes no token in it."""
        self._taken += 1
        self._gaps += 1
        recorded = RecordedIteration(self._last.stop, self._last.stop, self._lead or "", gap=True)
        if not self._capped():
            return Verdict(before.settled, iteration=recorded)
        self._end_capped()
        return Verdict(before.settled, iteration=recorded, close_after="max_iterations")

    # -- ends and beginnings ----------------------------------------------------------------------------------------

    def _in_vain(self, settled: int | None, token: int) -> Verdict:
        """Nothing of the window was made: it is still to come. A part that was closed before this was told stays."""
        was_open = self.is_open
        self.is_open = False
        self._taken = 0
        self._part -= was_open
        self._aim(token)
        return Verdict(settled, discard=True) if was_open else NO_ACTION

    def _end_capped(self) -> None:
        """At its cap; complete unless it may hold nothing, which the lead's next iteration tells."""
        self.is_open = False
        if not self._doubtful:
            self._complete(self._certain)

    def _complete(self, token: int) -> None:
        """The capture is; the lead, about to make `token`, goes for the next window."""
        self._capture_done()
        self._has_prepared = False
        self._part = 0
        self._doubtful = False
        self._aim(token)

    def _aim(self, token: int) -> None:
        """Point the lead, about to make `token`, at the first window that it can capture whole, else let it go."""
        self._target = next((i for i in self._pending if self.windows[i].start >= token), -1)
        if self._target >= 0:
            start = self.windows[self._target].start
            self._goal = start if self._has_prepared else max(start - PREPARE_AHEAD, 0)
            return
        self._furthest = max(self._furthest, token - 1)
        self._passed.add(self._lead or "")
        self._lead, self._last, self._goal = None, _NONE_MADE, -1

    def _choose(self, batch: Batch) -> range | None:
        """A new lead, and what it is about to make; None where no request can reach a window any more."""
        if self._passed.issuperset(batch):
            return None
        limit = self.windows[self._pending[-1]].start
        chosen, best = None, -1
        for request, made in batch.items():
            if made.start > limit:
                self._passed.add(request)
            elif made.start > best and request not in self._passed:
                chosen, best = request, made.start
                if self._first:
                    break
            self._first = False
        self._first = False
        if chosen is None:
            return None
        self._lead = chosen
        made = self._last = batch[chosen]
        self._aim(made.start)
        return made
