"""`track: lead`: the tokens of one request count. While it runs, a step costs the same at any batch size."""

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
"""Tokens before its window at which the lead asks for the device profiler to be prepared. Attaching a profiler to a GPU
takes time and disturbs its first records. One that waits for long costs each iteration a little."""

_NO_TOKENS = range(0)


class LeadGate(Gate):
    """Follows the first request scheduled after arming through every window that is left.

    The lead ends, or passes all windows: then the gate chooses a new one. It takes the running request that is furthest
    along and has not passed the start of a window still to be captured. Of several, it takes the one scheduled first.
    All ranks of an engine see the same schedule, so they choose alike.

    The lead pauses too long inside its window: then the capture is closed but not complete. It continues as the next
    part when the lead makes tokens again.
    """

    def _reset(self) -> None:
        self._lead: str | None = None
        self._lead_tokens = _NO_TOKENS
        """The tokens that the lead was about to make when it was last scheduled."""
        self._lead_absent = False
        """Whether the lead was missing from the batch of the last step."""
        self._quiet_until = -1
        """Nothing can change before the lead may make this token; -1 while its capture is under way."""
        self._has_prepared = False
        """Whether the device profiler was asked to get ready for the target window."""
        self._furthest_of_earlier_leads = -1
        self._parts = 0
        """Parts of the capture under way, closed or open."""
        self._gaps_in_a_row = 0
        """Iterations in a row without a token of the lead, while a capture is open."""
        self._start_unconfirmed = False
        """The capture opened because the lead might reach the window. Whether it did is not known yet."""
        self._choosing_first_lead = True
        self._past_every_window: set[str] = set()
        """Requests that have passed every window that is left. Remembered, so that each is looked at only once."""
        self._quota_changes = self.quota.changes
        """What the set above holds for."""

    @property
    def furthest(self) -> int:
        return max(self._furthest_of_earlier_leads, self._tokens_certain - 1)

    @property
    def headroom(self) -> int:
        if self._lead is None or self._lead_absent or self.is_open:
            return 0
        return max(self._quiet_until - self._lead_tokens.stop, 0)

    @property
    def _tokens_certain(self) -> int:
        """Tokens that the lead has made for certain. An iteration that makes tokens makes at least one."""
        return self._lead_tokens.start + bool(self._lead_tokens)

    def step(self, batch: Batch, finished: Finished = NONE_FINISHED) -> Verdict:
        lead = self._lead
        if lead is not None and not finished:  # nearly every iteration is answered here
            made = batch.get(lead)
            if made is None:
                self._lead_absent = True
                if not self.is_open:
                    return NO_ACTION
            elif made.stop <= self._quiet_until:
                self._lead_absent = False
                self._lead_tokens = made
                return NO_ACTION
        verdict = super().step(batch, finished)
        self._lead_absent = self._lead is not None and batch.get(self._lead) is None
        return verdict

    def disarm(self, reason: CloseReason = "stop_profile") -> Verdict:
        self._quiet_until = -1
        return super().disarm(reason)

    def _step(self, batch: Batch, finished: Finished) -> Verdict:
        """Answer an iteration that may change something: the lead is new, gone, or near its window."""
        self._past_every_window.difference_update(finished)
        so_far, made = NO_ACTION, None
        if self._lead is not None:
            made = batch.get(self._lead)
            if self._lead in finished:
                so_far = self._on_lead_finished(finished[self._lead])
            elif made is not None:
                so_far = self._on_lead_scheduled(made)
            elif self.is_open:
                so_far = self._on_lead_absent()
        if self.is_open:
            return self._record(so_far, made) if made else self._record_gap(so_far)
        if self._lead is None:
            made = self._choose_lead(batch) if self.armed else None
        if not made:
            return so_far
        if self.windows[self._target].overlaps(made.start, made.stop):
            return self._open_capture(so_far, made)
        if so_far is NO_ACTION and made.stop > self._quiet_until and not self._recorded:
            return self._prepare()
        return so_far

    def _prepare(self) -> Verdict:
        """The lead is close to its window: ask for the device profiler, once."""
        self._has_prepared = True
        self._quiet_until = self.windows[self._target].start
        return NO_ACTION if self.quota.skips_next(self._target) else PREPARE

    def _on_idle(self, finished: Finished) -> Verdict:
        self._past_every_window.clear()
        return NO_ACTION if self._lead is None else self._on_lead_finished(finished.get(self._lead))

    # -- what is known now of the lead ------------------------------------------------------------------------------

    def _on_lead_scheduled(self, made: range) -> Verdict:
        """Where the lead continues tells how many tokens its last iteration made."""
        last, self._lead_tokens = self._lead_tokens, made
        token = made.start
        if not self._recorded:
            self._target_next_window(token)
            return NO_ACTION
        window = self.windows[self._target]
        settled = token if self.is_open and last.stop != token else None
        unconfirmed, self._start_unconfirmed = self._start_unconfirmed, False
        if unconfirmed and token <= window.start:
            return self._discard_opening(settled, token)
        close: CloseReason | None = None
        if window.end is not None and token >= window.end:
            close = "window"
        elif self._at_cap():
            close = "max_iterations"
        elif self.is_open and not made and self._gaps_in_a_row >= MAX_GAP:
            self.is_open = False
            return Verdict(settled, close="gap")
        else:
            return Verdict(settled) if settled is not None else NO_ACTION
        was_open = self.is_open
        self._complete_window(token)
        return Verdict(settled, close=close) if was_open else NO_ACTION

    def _on_lead_absent(self) -> Verdict:
        """The lead pauses while a capture is open. How many tokens its last iteration made is not known yet."""
        window = self.windows[self._target]
        if window.end is not None and self._tokens_certain >= window.end:
            self._complete_window(self._tokens_certain)
            return Verdict(close="window")
        if self._at_cap():
            self._stop_at_cap()
            return Verdict(close="max_iterations")
        if self._gaps_in_a_row >= MAX_GAP:
            self.is_open = False
            return Verdict(close="gap")
        return NO_ACTION

    def _on_lead_finished(self, final: int | None) -> Verdict:
        """The lead has ended, after `final` tokens where that is known. Its capture can become no more complete."""
        last, certain = self._lead_tokens, self._tokens_certain
        count = certain if final is None else final
        self._furthest_of_earlier_leads = max(self._furthest_of_earlier_leads, count - 1)
        verdict = NO_ACTION
        if self._recorded:
            window = self.windows[self._target]
            settled = final if self.is_open and final is not None and last.start <= final < last.stop else None
            if self._start_unconfirmed and final is not None and final <= window.start:
                verdict = self._discard_opening(settled, final)
            else:
                if self.is_open:
                    reached = window.end is not None and count >= window.end
                    verdict = Verdict(settled, close="window" if reached else "request_end")
                self._count_capture()
        self._lead, self._lead_tokens, self._quiet_until, self._target, self._parts = None, _NO_TOKENS, -1, -1, 0
        self._start_unconfirmed = self._has_prepared = False
        return verdict

    # -- the iteration ahead ----------------------------------------------------------------------------------------

    def _open_capture(self, so_far: Verdict, made: range) -> Verdict:
        window = self.windows[self._target]
        if self._recorded:  # the next part
            if not (self._skips or self.may_record(window)):
                return so_far
        elif not self._claim(self._target):
            self._let_window_pass(made)
            return so_far
        self.is_open = True
        self._quiet_until = -1
        self._parts += not self._skips
        self._start_unconfirmed = made.start < window.start
        return self._record(Verdict(so_far.settled, so_far.discard, so_far.close, Opening(window, self._parts)), made)

    def _record(self, so_far: Verdict, made: range) -> Verdict:
        """Record an iteration in which the lead makes tokens."""
        window = self.windows[self._target]
        self._recorded += 1
        self._gaps_in_a_row = 0
        recorded = RecordedIteration(made.start, made.stop, self._lead or "")
        close_after: CloseReason | None = None
        if len(made) == 1:  # one token is exact, so the end is known before the next iteration
            if window.end is not None and made.stop >= window.end:
                close_after = "window"
            elif self._at_cap():
                close_after = "max_iterations"
        if close_after is not None:
            self._complete_window(made.stop)
        return Verdict(so_far.settled, so_far.discard, so_far.close, so_far.open, recorded, close_after)

    def _record_gap(self, so_far: Verdict) -> Verdict:
        """Record an iteration in which the lead makes no token."""
        self._recorded += 1
        self._gaps_in_a_row += 1
        recorded = RecordedIteration(self._lead_tokens.stop, self._lead_tokens.stop, self._lead or "", gap=True)
        if not self._at_cap():
            return Verdict(so_far.settled, iteration=recorded)
        self._stop_at_cap()
        return Verdict(so_far.settled, iteration=recorded, close_after="max_iterations")

    # -- ends and beginnings ----------------------------------------------------------------------------------------

    def _discard_opening(self, settled: int | None, token: int) -> Verdict:
        """The lead made no token of the window: the window is still to come. Parts that are closed already stay."""
        was_open = self.is_open
        self._drop_capture()
        self._parts -= was_open and not self._skips
        self._target_next_window(token)
        return Verdict(settled, discard=True) if was_open else NO_ACTION

    def _let_window_pass(self, made: range) -> None:
        """The window cannot open now. The lead makes its first token all the same and heads for the next window."""
        furthest = max(self._furthest_of_earlier_leads, made.start)
        self._has_prepared = False
        self._target_next_window(max(made.stop, self.windows[self._target].start + 1))
        if self._lead is None:
            self._furthest_of_earlier_leads = furthest

    def _stop_at_cap(self) -> None:
        """Close at `max_iterations`. Whether the capture counts is open while its start is unconfirmed."""
        self.is_open = False
        if not self._start_unconfirmed:
            self._complete_window(self._tokens_certain)

    def _complete_window(self, token: int) -> None:
        """Count the capture. The lead is about to make `token` and heads for the next window."""
        self._count_capture()
        self._parts = 0
        self._start_unconfirmed = self._has_prepared = False
        self._target_next_window(token)

    def _target_next_window(self, token: int) -> None:
        """Head for the first window that the lead, about to make `token`, can still make whole. Else drop the lead."""
        self._target = next((i for i in self.quota.wanted if self.windows[i].start >= token), -1)
        if self._target >= 0:
            start = self.windows[self._target].start
            self._quiet_until = start if self._has_prepared else max(start - PREPARE_AHEAD, 0)
            return
        self._furthest_of_earlier_leads = max(self._furthest_of_earlier_leads, token - 1)
        self._past_every_window.add(self._lead or "")
        self._lead, self._lead_tokens, self._quiet_until = None, _NO_TOKENS, -1

    def _choose_lead(self, batch: Batch) -> range | None:
        """Choose a new lead and return the tokens it is about to make. None: no request can reach a window any more."""
        wanted = self.quota.wanted
        if not wanted:  # other loops have captured the rest
            return None
        if self._quota_changes != self.quota.changes:
            self._quota_changes = self.quota.changes
            self._past_every_window.clear()
        if self._past_every_window.issuperset(batch):
            return None
        limit = self.windows[wanted[-1]].start
        chosen, best = None, -1
        for request, made in batch.items():
            if made.start > limit:
                self._past_every_window.add(request)
            elif made.start > best and request not in self._past_every_window:
                chosen, best = request, made.start
                if self._choosing_first_lead:
                    break
            self._choosing_first_lead = False
        self._choosing_first_lead = False
        if chosen is None:
            return None
        self._lead = chosen
        made = self._lead_tokens = batch[chosen]
        self._target_next_window(made.start)
        return made
