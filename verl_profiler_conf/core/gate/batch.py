"""`track: any` and `track: all`: the tokens of every request count. An iteration costs in proportion to the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_profiler_conf.core.gate.base import Gate
from verl_profiler_conf.core.gate.coverage import Coverage
from verl_profiler_conf.core.gate.quota import CaptureQuota
from verl_profiler_conf.core.gate.verdict import (
    NO_ACTION,
    Batch,
    CloseReason,
    Finished,
    Opening,
    RecordedIteration,
    Verdict,
)
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow


class BatchGate(Gate):
    """Captures the iterations in which any request makes a token of the window, or every decoding request does.

    Iterations in a row that qualify are one capture. With several windows, a capture belongs to one window for as long
    as that window qualifies. After that, the first other window that qualifies opens.

    Args:
        everyone: every decoding request has to make a token of the window (`track: all`).
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        everyone: bool,
        max_iterations: int | None = None,
        max_captures: int | None = 1,
        skip_captures: int = 0,
        armed: bool = True,
        quota: CaptureQuota | None = None,
    ) -> None:
        self._needs_all = everyone
        super().__init__(
            windows,
            max_iterations=max_iterations,
            max_captures=max_captures,
            skip_captures=skip_captures,
            armed=armed,
            quota=quota,
        )

    def _reset(self) -> None:
        self._furthest = -1
        self._running: dict[str, range] = {}
        """Requests seen since arming, and where they stood. The final count of any other request includes tokens made
        before arming."""
        self._coverage = Coverage(self.windows)
        self._nearest_to_all: dict[int, tuple[int, int]] = {}
        """Window -> the decoding requests that made tokens of it, and all that decoded, in the iteration that came
        nearest to `track: all`."""
        self._inside_window: dict[str, range] = {}
        """The requests, and their tokens, that made the last recorded iteration qualify."""
        self._start_confirmed = False
        """Whether any recorded iteration is known to have made a token of the window."""
        self._blocked: set[int] = set()
        """Windows that reached `max_iterations` or could not open. Each has to stop qualifying before it can open."""

    @property
    def furthest(self) -> int:
        return self._furthest

    @property
    def headroom(self) -> int:
        wanted = self.quota.wanted
        if self.is_open or not self.armed or not wanted:
            return 0
        spans = [(self.windows[index].start, self.windows[index].end) for index in wanted]
        nearest = spans[0][0]
        for made in self._running.values():
            for start, end in spans:
                if made.stop <= start:
                    nearest = min(nearest, start - made.stop)
                    break
                if end is None or made.start < end:
                    return 0
        return nearest

    def why_unreached(self, window: TokenWindow) -> str | None:
        inside, decoding = self._nearest_to_all.get(self.windows.index(window), (0, 0))
        if not inside:
            return None
        return (
            f"track: all needs every decoding request to make tokens of it in the same iteration, and at most {inside}"
            f" of {decoding} did"
        )

    def coverage(self, window: TokenWindow) -> tuple[int, int] | None:
        return None if window.end is None else self._coverage.figures(self.windows.index(window), self._running)

    def disarm(self, reason: CloseReason = "stop_profile") -> Verdict:
        if self.is_open:  # what the last iteration made will not be told any more
            self._cover(self._inside_window.values())
        return super().disarm(reason)

    def _step(self, batch: Batch, finished: Finished) -> Verdict:
        if type(batch) is not dict:
            batch = dict(batch.items())  # an engine's lazy mapping computes a range at each access
        self._follow_progress(batch, finished)
        so_far = self._learn_result(batch, finished)
        if self.is_open:
            inside = self._requests_inside(self._target, batch)
            if inside:
                return self._record(so_far, inside)
            so_far = self._close_capture(so_far, finished, idle=False)
        if self._blocked:
            self._blocked = {index for index in self._blocked if self._requests_inside(index, batch)}
        for index in self.quota.wanted:
            inside = {} if index in self._blocked else self._requests_inside(index, batch)
            if inside and not self._claim(index):
                self._blocked.add(index)
            elif inside:
                self.is_open = True
                self._target = index
                self._start_confirmed = False
                opening = Opening(self.windows[index])
                return self._record(Verdict(so_far.settled, so_far.discard, so_far.close, opening), inside)
        return so_far

    def _on_idle(self, finished: Finished) -> Verdict:
        self._follow_progress({}, finished)
        so_far = self._learn_result({}, finished)
        self._blocked.clear()
        for request, made in self._running.items():
            self._coverage.end(request, made.stop)
        self._running.clear()
        return self._close_capture(so_far, finished, idle=True) if self.is_open else so_far

    def _follow_progress(self, batch: Batch, finished: Finished) -> None:
        for request, final in finished.items():
            last = self._running.pop(request, None)
            if last is not None:
                self._furthest = max(self._furthest, (final or 0) - 1)
                self._coverage.end(request, last.stop if final is None else final)
        for request in batch.keys() - self._running.keys():
            self._coverage.begin(request, batch[request].start)
        self._running.update(batch)
        furthest = self._furthest
        for made in batch.values():
            token = made.start
            if token > furthest:
                furthest = token if made else max(furthest, token - 1)
        self._furthest = furthest

    def _requests_inside(self, index: int, batch: Batch) -> dict[str, range]:
        """The requests that make, or may make, a token of the window; empty where the iteration does not qualify."""
        window = self.windows[index]
        start, end = window.start, MAX_TOKEN + 1 if window.end is None else window.end
        inside: dict[str, range] = {}
        outside = 0
        for request, made in batch.items():
            if made.stop > start and made.start < end:  # `window.overlaps`, without a call per request
                if made:
                    inside[request] = made
            elif made:
                outside += 1
        if not (outside and self._needs_all):
            return inside
        if inside:
            best, decoding = self._nearest_to_all.get(index, (0, 1))
            if len(inside) * decoding > best * (len(inside) + outside):
                self._nearest_to_all[index] = len(inside), len(inside) + outside
        return {}

    def _belongs(self, stops: Iterable[int]) -> bool:
        """Whether an iteration made a token of the window. `stops`: where its requests stood after it."""
        start = self.windows[self._target].start
        inside = (stop > start for stop in stops)
        return all(inside) if self._needs_all else any(inside)

    def _record(self, so_far: Verdict, inside: dict[str, range]) -> Verdict:
        self._recorded += 1
        self._inside_window = inside
        request = next(iter(inside))
        lo, hi = min(made.start for made in inside.values()), max(made.stop for made in inside.values())
        recorded = RecordedIteration(lo, hi, request)
        close_after: CloseReason | None = None
        exact = all(len(made) == 1 for made in inside.values())
        if exact and self._at_cap():
            self._cover(inside.values())
            self._stop_at_cap()
            close_after = "max_iterations"
        return Verdict(so_far.settled, so_far.discard, so_far.close, so_far.open, recorded, close_after)

    def _learn_result(self, batch: Batch, finished: Finished) -> Verdict:
        """How many tokens the last recorded iteration really made, as far as this one tells."""
        if not self.is_open:
            return NO_ACTION
        stops: list[int] = []
        for request, made in self._inside_window.items():
            now = batch.get(request)
            known = now.start if now is not None else finished.get(request)
            # Unknown counts as the upper bound: one iteration too many in a trace is better than one missing.
            stops.append(made.stop if known is None else min(max(known, made.start), made.stop))
        highest = max(stops)
        settled = highest if highest < max(made.stop for made in self._inside_window.values()) else None
        self._start_confirmed = self._start_confirmed or self._belongs(stops)
        if not self._start_confirmed:
            self._drop_capture()
            return Verdict(settled, discard=True)
        starts = (made.start for made in self._inside_window.values())
        self._cover(map(range, starts, stops))
        if self._at_cap():
            self._stop_at_cap()
            return Verdict(settled, close="max_iterations")
        return Verdict(settled) if settled is not None else NO_ACTION

    def _cover(self, made: Iterable[range]) -> None:
        """An iteration of the target window made these tokens. Those of a window that goes by are not asked for."""
        if self._skips:
            self._coverage.leave_out(self._target, made)
        else:
            self._coverage.hold(self._target, made)

    def _stop_at_cap(self) -> None:
        self._blocked.add(self._target)
        self._count_capture()

    def _close_capture(self, so_far: Verdict, finished: Finished, *, idle: bool) -> Verdict:
        """Close: nothing qualifies any more. The reason is `request_end` where all requests ended before the window."""
        end = self.windows[self._target].end
        reason: CloseReason = "request_end"
        for request, made in self._inside_window.items():
            final = finished.get(request)
            count = made.start + 1 if final is None else final
            if not (idle or request in finished) or (end is not None and count >= end):
                reason = "window"
                break
        self._count_capture()
        return Verdict(so_far.settled, close=reason)
