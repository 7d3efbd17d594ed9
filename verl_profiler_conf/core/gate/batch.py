"""`track: any` and `track: all`: the tokens of the whole batch count. Cost proportional to the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_profiler_conf.core.gate.base import Gate
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
    """Captures an iteration when any running request makes a token of the window in it, or (`everyone`) when every
    decoding request does. One unbroken stretch of such iterations is one capture.

    With several windows, a capture stays with its window as long as that is touched; then the first other one that is
    touched opens.
    """

    def __init__(
        self,
        windows: Sequence[TokenWindow],
        *,
        everyone: bool,
        max_iterations: int | None = None,
        max_captures: int | None = 1,
        armed: bool = True,
    ) -> None:
        self._everyone = everyone
        super().__init__(windows, max_iterations=max_iterations, max_captures=max_captures, armed=armed)

    def _reset(self) -> None:
        self._furthest = -1
        self._running: set[str] = set()
        """Requests seen since arming; the count of another one tells of tokens made before it."""
        self._touching: dict[str, range] = {}
        """Requests whose tokens of the window the last captured iteration made, or might have made."""
        self._held = False
        """Whether any captured iteration is known to belong to the capture."""
        self._barred: set[int] = set()
        """Windows that hit their cap and are still touched: they must be left before they can open again."""

    @property
    def furthest(self) -> int:
        return self._furthest

    def _step(self, batch: Batch, finished: Finished) -> Verdict:
        if type(batch) is not dict:
            batch = dict(batch.items())  # an engine's lazy mapping works each range out anew whenever it is asked
        self._note(batch, finished)
        before = self._settle(batch, finished)
        if self.is_open:
            touching = self._touch(self._target, batch)
            if touching:
                return self._take(before, touching)
            before = self._close(before, finished, idle=False)
        if self._barred:
            self._barred = {index for index in self._barred if self._touch(index, batch)}
        for index in self._pending:
            touching = {} if index in self._barred else self._touch(index, batch)
            if touching:
                self.is_open = True
                self._target = index
                self._held = False
                opening = Opening(self.windows[index])
                return self._take(Verdict(before.settled, before.discard, before.close, opening), touching)
        return before

    def _on_idle(self, finished: Finished) -> Verdict:
        self._note({}, finished)
        before = self._settle({}, finished)
        self._barred.clear()
        self._running.clear()
        return self._close(before, finished, idle=True) if self.is_open else before

    def _note(self, batch: Batch, finished: Finished) -> None:
        for request, final in finished.items():
            if request in self._running:
                self._running.remove(request)
                self._furthest = max(self._furthest, (final or 0) - 1)
        self._running.update(batch)
        furthest = self._furthest
        for made in batch.values():
            token = made.start
            if token > furthest:
                furthest = token if made else max(furthest, token - 1)
        self._furthest = furthest

    def _touch(self, index: int, batch: Batch) -> dict[str, range]:
        """The requests that make, or may make, a token of the window; none where the rule does not hold."""
        window = self.windows[index]
        start, end = window.start, MAX_TOKEN + 1 if window.end is None else window.end
        touching: dict[str, range] = {}
        for request, made in batch.items():
            if made.stop > start and made.start < end:  # `window.overlaps`, without a call per request
                if made:
                    touching[request] = made
            elif made and self._everyone:
                return {}
        return touching

    def _holds(self, stops: Iterable[int]) -> bool:
        """Whether an iteration belongs to the capture, after which the requests that touched it are at `stops`."""
        start = self.windows[self._target].start
        inside = (stop > start for stop in stops)
        return all(inside) if self._everyone else any(inside)

    def _take(self, before: Verdict, touching: dict[str, range]) -> Verdict:
        self._taken += 1
        self._touching = touching
        request = next(iter(touching))
        lo, hi = min(made.start for made in touching.values()), max(made.stop for made in touching.values())
        recorded = RecordedIteration(lo, hi, request)
        close_after: CloseReason | None = None
        if self._capped() and all(len(made) == 1 for made in touching.values()):  # exact: nothing more need be told
            self._end_capped()
            close_after = "max_iterations"
        return Verdict(before.settled, before.discard, before.close, before.open, recorded, close_after)

    def _settle(self, batch: Batch, finished: Finished) -> Verdict:
        """What the last captured iteration really made, as far as this one tells."""
        if not self.is_open:
            return NO_ACTION
        stops: list[int] = []
        for request, made in self._touching.items():
            now = batch.get(request)
            known = now.start if now is not None else finished.get(request)
            # a request that is neither here nor counted keeps its bound: better one iteration too many than a hole
            stops.append(made.stop if known is None else min(max(known, made.start), made.stop))
        highest = max(stops)
        settled = highest if highest < max(made.stop for made in self._touching.values()) else None
        self._held = self._held or self._holds(stops)
        if not self._held:
            self.is_open = False
            self._target = -1
            self._taken = 0
            return Verdict(settled, discard=True)
        if self._capped():
            self._end_capped()
            return Verdict(settled, close="max_iterations")
        return Verdict(settled) if settled is not None else NO_ACTION

    def _end_capped(self) -> None:
        self._barred.add(self._target)
        self._capture_done()

    def _close(self, before: Verdict, finished: Finished, *, idle: bool) -> Verdict:
        """The window is touched no more: `request_end` where all who touched it ended before it did."""
        end = self.windows[self._target].end
        reason: CloseReason = "request_end"
        for request, made in self._touching.items():
            final = finished.get(request)
            count = made.start + 1 if final is None else final
            if not (idle or request in finished) or (end is not None and count >= end):
                reason = "window"
                break
        self._capture_done()
        return Verdict(before.settled, close=reason)
