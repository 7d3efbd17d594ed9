"""`track: lead`: one request's tokens count. Constant cost per iteration while a lead is known."""

from __future__ import annotations

from verl_profiler_conf.gate.base import MAX_GAP, Gate
from verl_profiler_conf.gate.verdict import IDLE, Batch, CloseReason, Finished, Opening, Row, Verdict

_NONE_MADE = range(0)


class LeadGate(Gate):
    """Follows the first request scheduled after arming through every window that is left.

    When it ends, or has passed all of them, the lead goes to the running request that is furthest along and has not
    passed the start of a window still to be captured; ties go to the one scheduled first, so that all ranks of an
    engine, which see the same schedule, choose alike.
    """

    def _reset(self) -> None:
        self._lead: str | None = None
        self._last = _NONE_MADE
        """The lead's range when it was last scheduled."""
        self._furthest = -1
        self._part = 0
        """Parts opened of the capture under way; 0: none, the lead has not reached its target."""
        self._gaps = 0
        """Iterations in a row without a token of the lead, while open."""
        self._tentative = False
        """Open only because the lead might reach the window in the last iteration; the next one tells."""
        self._first = True
        self._passed: set[str] = set()
        """Requests that can capture nothing any more, so that waiting for an arrival costs no look at each."""

    @property
    def furthest(self) -> int:
        return max(self._furthest, self._last.start - (not self._last))

    def _step(self, batch: Batch, finished: Finished) -> Verdict:
        lead = self._lead
        if lead is not None and not self.is_open and lead not in finished:
            made = batch.get(lead)
            if made is None:
                return IDLE
            if self._target >= 0 and made.stop <= self.windows[self._target].start:
                self._last = made
                return IDLE
        return self._turn(batch, finished)

    def _turn(self, batch: Batch, finished: Finished) -> Verdict:
        """An iteration that may change something: the lead is new, gone, or near its window."""
        before = self._end_lead(finished) if finished else IDLE
        if self._lead is not None:
            made = batch.get(self._lead)
            if made is None:
                return self._pause(before) if self.is_open else before
            before = self._settle(made.start)
            if self.is_open and not made:
                return self._pause(before)
            self._last = made
            if self.is_open:
                return self._take(before, made)
            self._aim(made.start)
        if self._lead is None and self.armed:
            self._choose(batch)
        if self._lead is None or not self.armed:
            return before
        made = self._last = batch[self._lead]
        if self.windows[self._target].overlaps(made.start, made.stop):
            return self._open(before, made)
        return before

    def _open(self, before: Verdict, made: range) -> Verdict:
        window = self.windows[self._target]
        self.is_open = True
        self._part += 1
        self._tentative = made.start < window.start
        verdict = Verdict(before.settled, before.discard, before.close, open=Opening(window, self._part))
        return self._take(verdict, made)

    def _take(self, before: Verdict, made: range) -> Verdict:
        """Capture this iteration, in which the lead makes tokens."""
        window = self.windows[self._target]
        self._taken += 1
        self._gaps = 0
        row = Row(made.start, made.stop, self._lead or "")
        last: CloseReason | None = None
        if len(made) == 1:  # exact: what it makes is known now, and the next iteration need not tell
            if window.end is not None and made.start >= window.end - 1:
                last = "window"
            elif self._capped():
                last = "max_iterations"
        if last is not None:
            self._complete()
        return Verdict(before.settled, before.discard, before.close, before.open, row, last)

    def _settle(self, next_token: int) -> Verdict:
        """The lead is about to make `next_token`: what the iteration before really made is known now."""
        if not self.is_open:
            return IDLE
        window = self.windows[self._target]
        settled = next_token if self._last and next_token != self._last.stop else None
        self._last = range(self._last.start, next_token)
        if self._tentative:
            self._tentative = False
            if next_token <= window.start:
                self._drop()
                return Verdict(settled, discard=True)
        if window.end is not None and next_token >= window.end:
            self._complete()
            return Verdict(settled, close="window")
        if self._capped():
            self._complete()
            return Verdict(settled, close="max_iterations")
        return Verdict(settled) if settled is not None else IDLE

    def _pause(self, before: Verdict) -> Verdict:
        """Open, and the lead makes no token in this iteration."""
        self._gaps += 1
        if self._gaps > MAX_GAP:
            self.is_open = self._tentative = False
            return Verdict(before.settled, close="gap")
        self._taken += 1
        row = Row(self._last.stop, self._last.stop, self._lead or "", gap=True)
        if self._capped():
            self._complete()
            return Verdict(before.settled, row=row, last="max_iterations")
        return Verdict(before.settled, row=row)

    def _end_lead(self, finished: Finished) -> Verdict:
        """Take note of requests that ended; the lead among them leaves its capture as complete as it will be."""
        self._passed.difference_update(finished)
        lead = self._lead
        if lead is None or lead not in finished:
            return IDLE
        return self._lead_ended(finished[lead])

    def _lead_ended(self, final: int | None) -> Verdict:
        last = self._last
        count = final if final is not None else last.stop
        self._furthest = max(self._furthest, count - 1)
        self._last = _NONE_MADE
        self._lead = None
        if not self.is_open:
            if self._part:  # paused inside its window: what was captured is all there will be
                self._complete()
            self._target = -1
            return IDLE
        window = self.windows[self._target]
        settled = count if last and last.start < count < last.stop else None
        if self._tentative and count <= window.start:
            self._drop()
            self._target = -1
            return Verdict(settled, discard=True)
        reached = window.end is not None and count >= window.end
        self._complete()
        return Verdict(settled, close="window" if reached else "request_end")

    def _rest(self, finished: Finished) -> Verdict:
        verdict = IDLE
        if self._lead is not None:
            verdict = self._lead_ended(finished.get(self._lead))
        self._passed.clear()
        return verdict

    def _drop(self) -> None:
        """Undo the opening: nothing of the window was made."""
        self.is_open = self._tentative = False
        self._part -= 1
        self._taken = 0

    def _complete(self) -> None:
        self._part = 0
        self._tentative = False
        self._gaps = 0
        self._capture_done()

    def _aim(self, next_token: int) -> None:
        """Point the lead at the first window that it can still capture whole, else let it go."""
        if self._part:  # the rest of a window, after a long pause
            end = self.windows[self._target].end
            if end is None or next_token < end:
                return
            self._complete()
        self._target = next((i for i in self._pending if self.windows[i].start >= next_token), -1)
        if self._target < 0:
            self._furthest = max(self._furthest, next_token - 1)
            if self._lead is not None:
                self._passed.add(self._lead)
            self._lead = None

    def _choose(self, batch: Batch) -> None:
        if not batch:
            return
        reach = self.windows[self._pending[-1]].start
        chosen: str | None = None
        if self._first:
            self._first = False
            head = next(iter(batch))
            if batch[head].start <= reach:
                chosen = head
        if chosen is None and batch.keys() - self._passed:
            best = -1
            for request, made in batch.items():
                if request in self._passed:
                    continue
                if made.start > reach:
                    self._passed.add(request)
                elif made.start > best:
                    chosen, best = request, made.start
        if chosen is not None:
            self._lead = chosen
            self._aim(batch[chosen].start)
