"""`track: any` and `track: all`: the tokens of the whole batch count. Cost proportional to the batch."""

from __future__ import annotations

from verl_profiler_conf.gate.base import Gate
from verl_profiler_conf.gate.verdict import IDLE, Batch, CloseReason, Finished, Opening, Row, Verdict
from verl_profiler_conf.window import TokenWindow


class CrowdGate(Gate):
    """Captures an iteration when any running request makes a token of the window in it, or (`everyone`) when every
    decoding request does. One unbroken stretch of such iterations is one capture.

    With several windows, a capture stays with its window as long as that is touched; then the first other one that is
    touched opens.
    """

    def __init__(
        self,
        windows: tuple[TokenWindow, ...] | list[TokenWindow],
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
        self._touching: dict[str, range] = {}
        """Requests whose tokens of the window the last captured iteration made, or might have made."""
        self._certain = True
        """Whether the last captured iteration is known to belong to the capture."""
        self._rows = 0
        """Captured iterations that are known to belong to it."""
        self._capped_out = -1
        """A window that hit its cap and is still touched: it must be left before it can open again."""

    @property
    def furthest(self) -> int:
        return self._furthest

    def _step(self, batch: Batch, finished: Finished) -> Verdict:
        before = self._settle(batch, finished)
        for made in batch.values():
            self._furthest = max(self._furthest, made.start - (not made))
        if self.is_open:
            touching = self._touch(self.windows[self._target], batch)
            if touching:
                return self._take(before, touching)
            before = self._close(before, finished)
        if self._capped_out >= 0 and not self._touch(self.windows[self._capped_out], batch):
            self._capped_out = -1
        for index in self._pending:
            window = self.windows[index]
            touching = self._touch(window, batch) if index != self._capped_out else {}
            if touching:
                self.is_open = True
                self._target = index
                self._rows = 0
                return self._take(Verdict(before.settled, before.discard, before.close, Opening(window)), touching)
        return before

    def _touch(self, window: TokenWindow, batch: Batch) -> dict[str, range]:
        """The requests that make, or may make, a token of the window; none where the rule does not hold."""
        touching: dict[str, range] = {}
        for request, made in batch.items():
            if not made:
                continue
            if window.overlaps(made.start, made.stop):
                touching[request] = made
            elif self._everyone:
                return {}
        return touching

    def _take(self, before: Verdict, touching: dict[str, range]) -> Verdict:
        window = self.windows[self._target]
        self._taken += 1
        self._touching = touching
        sure = [made.start >= window.start for made in touching.values()]
        self._certain = all(sure) if self._everyone else any(sure)
        self._rows += self._certain
        request = next(iter(touching))
        row = Row(min(m.start for m in touching.values()), max(m.stop for m in touching.values()), request)
        if self._capped() and self._certain and all(len(made) == 1 for made in touching.values()):
            self._cap()
            return Verdict(before.settled, before.discard, before.close, before.open, row, "max_iterations")
        return Verdict(before.settled, before.discard, before.close, before.open, row)

    def _settle(self, batch: Batch, finished: Finished) -> Verdict:
        """What the last captured iteration really made, as far as this one tells."""
        for final in finished.values():
            self._furthest = max(self._furthest, (final or 0) - 1)
        if not self.is_open:
            return IDLE
        window = self.windows[self._target]
        reached: dict[str, int] = {}
        for request, made in self._touching.items():
            now = batch.get(request)
            known = now.start if now is not None else finished.get(request)
            # a request that is neither here nor counted keeps its bound: better one iteration too many than a hole
            reached[request] = made.stop if known is None else min(max(known, made.start), made.stop)
        highest = max(reached.values())
        settled = highest if highest != max(made.stop for made in self._touching.values()) else None
        if not self._certain:
            inside = [stop > window.start for stop in reached.values()]
            self._certain = all(inside) if self._everyone else any(inside)
            self._rows += self._certain
            if not self._rows:
                self.is_open = False
                self._target = -1
                self._taken = 0
                return Verdict(settled, discard=True)
        if self._capped():
            self._cap()
            return Verdict(settled, close="max_iterations")
        return Verdict(settled) if settled is not None else IDLE

    def _cap(self) -> None:
        self._capped_out = self._target
        self._capture_done()

    def _close(self, before: Verdict, finished: Finished) -> Verdict:
        ended = all(request in finished for request in self._touching)
        reason: CloseReason = "request_end" if ended else "window"
        self._capture_done()
        return Verdict(before.settled, before.discard, close=reason)

    def _rest(self, finished: Finished) -> Verdict:
        before = self._settle({}, finished)
        self._capped_out = -1
        if not self.is_open:
            return before
        self._capture_done()
        return Verdict(before.settled, before.discard, close="request_end")
