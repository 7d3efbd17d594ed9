"""What should have been captured, said slowly and with hindsight.

Written from the words of the contract. A gate lives from one iteration to the next; this looks at a whole rollout at
once and asks of each request: which iterations made tokens of the window, where did it pause, when could one know?

Knowledge matters under speculation only: an iteration makes at least one token, at most `range.stop`, and how many is
told when the request is next in a batch, or ends with a count. Until then a capture must act on what is possible,
so a row too many may be in a trace, never one too few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_profiler_conf.core.window import TokenWindow

from .play import Arming, Line, Trace, windows_of
from .schedules import Idle, Rollout, Setting, Start, Step, Stop

PATIENCE = 8
"""Iterations without a token of the lead over which its capture stays open (the contract's number)."""

Events = list[tuple[int, Step | Idle]]
"""(position in the rollout, event) of one arming, start and stop calls left out."""


def expected(rollout: Rollout, setting: Setting, *, armed: bool = True) -> list[Arming]:
    """What each arming of the rollout should have left."""
    armings: list[Arming] = []
    begin = 0 if armed else _next_start(rollout, 0)
    while begin is not None:
        begin, arming = _one_arming(rollout, begin, setting)
        armings.append(arming)
    return armings


def _next_start(rollout: Rollout, begin: int) -> int | None:
    return next((i + 1 for i in range(begin, len(rollout)) if isinstance(rollout[i], Start)), None)


def _one_arming(rollout: Rollout, begin: int, setting: Setting) -> tuple[int | None, Arming]:
    """The arming that begins with event `begin`, and where the next one does."""
    for index in range(begin, len(rollout)):
        event = rollout[index]
        if isinstance(event, Stop):
            return _next_start(rollout, index), _story(rollout, begin, index, "stop_profile", setting)
        if isinstance(event, Start):
            arming = _story(rollout, begin, index, "under way", setting)
            if not any(trace.reason == "under way" for trace in arming.traces):
                return index + 1, arming
            # a start call while a capture is open changes nothing
    return None, _story(rollout, begin, len(rollout), "job_end", setting)


def _story(rollout: Rollout, begin: int, end: int, reason: str, setting: Setting) -> Arming:
    events: Events = [(i, e) for i, e in enumerate(rollout[:end]) if i >= begin and isinstance(e, Step | Idle)]
    teller = LeadStory(events, reason, setting) if setting.track == "lead" else CrowdStory(events, reason, setting)
    teller.tell()
    unreached = tuple(window for window in teller.windows if window not in teller.reached)
    skipped = None if reason == "under way" else tuple(teller.skipped(window) for window in teller.windows)
    furthest = teller.furthest if unreached and not setting.skip_captures else None
    return Arming(tuple(teller.traces), unreached, skipped, furthest)


@dataclass(frozen=True)
class News:
    """What is told of a request after an iteration: `count` tokens in all (None: not told), at event `at`."""

    count: int | None
    at: int


class Story:
    """One arming, its events numbered from 0."""

    def __init__(self, events: Events, reason: str, setting: Setting) -> None:
        self.events = [event for _, event in events]
        self.positions = [position for position, _ in events]
        self.end = len(events)
        self.reason = reason
        self.windows = windows_of(setting)
        self.cap = setting.max_iterations or 10**9
        self.wanted = setting.max_captures or 10**9
        self.skips = setting.skip_captures
        self.times = dict.fromkeys(self.windows, self.wanted + self.skips)
        """Times that each window is still wanted. The first `skips` of them leave nothing."""
        self.reached: set[TokenWindow] = set()
        self.traces: list[Trace] = []
        self.furthest = -1

    @property
    def left(self) -> list[TokenWindow]:
        return [window for window in self.windows if self.times[window]]

    def made(self, request: str, at: int) -> range | None:
        """What the request is said to make in the iteration at event `at`; None where it is not scheduled."""
        event = self.events[at]
        return event.batch.get(request) if isinstance(event, Step) else None

    def ends(self, request: str, at: int) -> bool:
        """Whether event `at` brings word of its end: by name, or because nothing runs any more."""
        event = self.events[at]
        return request in event.ended or isinstance(event, Idle)

    def news(self, request: str, at: int) -> News:
        """When, after the iteration at `at`, its count is told. `at` = end: not within this arming."""
        for later in range(at + 1, self.end):
            if self.ends(request, later):
                return News(self.events[later].ended.get(request), later)
            made = self.made(request, later)
            if made is not None:
                return News(made.start, later)
        return News(None, self.end)

    def captured(self, window: TokenWindow) -> None:
        if not self.goes_by(window):
            self.reached.add(window)
        self.times[window] -= 1

    def goes_by(self, window: TokenWindow) -> bool:
        return self.times[window] > self.wanted

    def skipped(self, window: TokenWindow) -> int:
        return self.skips - max(self.times[window] - self.wanted, 0)

    def keep(self, window: TokenWindow, part: int, lines: Sequence[Line], reason: str) -> None:
        if not self.goes_by(window):
            self.traces.append(Trace(window, part, tuple(lines), reason))

    def tell(self) -> None:
        raise NotImplementedError


@dataclass
class IterationSpan:
    """An iteration in which the lead makes tokens, and those after it up to its next in which it makes none."""

    head: int
    made: range
    quiet: list[int]
    news: News
    """When it is told how far `made` really went."""

    @property
    def truth(self) -> int:
        """Tokens after it; as many as possible where that is never told."""
        return self.made.stop if self.news.count is None else self.news.count

    def misses(self, window: TokenWindow) -> bool:
        """It was possible, but did not reach the window."""
        return self.truth <= window.start

    def completes(self, window: TokenWindow) -> bool:
        """The rest of the window is made, and that is told or goes without saying."""
        if window.end is None:
            return False
        return self.surely_completes(window) or (self.news.count is not None and self.news.count >= window.end)

    def surely_completes(self, window: TokenWindow) -> bool:
        """Whatever it makes, it makes the window's last token."""
        return window.end is not None and self.made.start >= window.end - 1

    def waits(self, window: TokenWindow) -> list[int]:
        """Quiet iterations that pass while the window may still need more, so that a capture waits in them."""
        if self.surely_completes(window):
            return []
        if self.completes(window) or self.misses(window):
            return [at for at in self.quiet if at < self.news.at]
        return self.quiet


class LeadStory(Story):
    """`track: lead`."""

    def __init__(self, events: Events, reason: str, setting: Setting) -> None:
        super().__init__(events, reason, setting)
        self.vain: list[tuple[str, TokenWindow]] = []
        """Parts that were kept in doubt and hold nothing: they are files, so the next part's number counts them."""

    def tell(self) -> None:
        at, first = 0, True
        while self.left:
            lead, at, first = self._choose(at, first)
            if lead is None:
                return
            over = next((later for later in range(at + 1, self.end) if self.ends(lead, later)), self.end)
            at = self._lead(lead, at, over)

    def _choose(self, at: int, first: bool) -> tuple[str | None, int, bool]:
        """The first request scheduled, if a window is still before it; else the one furthest along of those."""
        limit = max(window.start for window in self.left)
        for now in range(at, self.end):
            event = self.events[now]
            if not isinstance(event, Step) or not event.batch:
                continue
            able = [request for request, made in event.batch.items() if made.start <= limit]
            if first and able and able[0] == next(iter(event.batch)):
                return able[0], now, False
            first = False
            if able:
                return max(able, key=lambda request: event.batch[request].start), now, False
        return None, self.end, first

    def _lead(self, lead: str, at: int, over: int) -> int:
        """The time of one lead, which ends at event `over` at the latest; returns where the next may be chosen."""
        began = at
        while at < over:
            made = self.made(lead, at)
            ahead = [window for window in self.left if window.start >= self._position(lead, began, at)]
            if not ahead:
                break
            if made is not None and ahead[0].overlaps(made.start, made.stop):
                at = self._capture(lead, ahead[0], at, over)
            else:
                at += 1
        self._see(lead, began, at, over)
        return at

    def _position(self, lead: str, began: int, at: int) -> int:
        """Tokens that the lead has certainly made when event `at` comes."""
        made = self.made(lead, at) if at < self.end else None
        if made is not None:
            return made.start
        seen = [made for now in range(began, at) if (made := self.made(lead, now)) is not None]
        return seen[-1].start + bool(seen[-1])

    def _see(self, lead: str, began: int, at: int, over: int) -> None:
        """The furthest token of a lead: as told at its end, else as far as it certainly came."""
        count = self.events[over].ended.get(lead) if at == over < self.end else None
        self.furthest = max(self.furthest, (self._position(lead, began, at) if count is None else count) - 1)

    def _stretches(self, lead: str, at: int, over: int) -> list[IterationSpan]:
        heads = [(now, made) for now in range(at, over) if (made := self.made(lead, now))]
        nexts = [*(now for now, _ in heads[1:]), over]
        return [
            IterationSpan(head, made, list(range(head + 1, following)), self.news(lead, head))
            for (head, made), following in zip(heads, nexts, strict=True)
        ]

    def _capture(self, lead: str, window: TokenWindow, at: int, over: int) -> int:
        """One attempt of the lead at the window, whose iteration `at` may make tokens of it; returns where it ends."""
        part, budget, lines = 1 + self.vain.count((lead, window)), self.cap, list[Line]()
        for stretch in self._stretches(lead, at, over):
            if not window.overlaps(stretch.made.start, stretch.made.stop):
                continue  # on the way there again, after a part that was kept in doubt turned out to hold nothing
            waits = stretch.waits(window)
            quiet = waits[: min(PATIENCE, budget - 1)]
            budget -= 1 + len(quiet)
            after = stretch.head + 1 + len(quiet)
            reason, known = self._closes(stretch, window, waits, budget, after, over)
            hi = stretch.truth if stretch.news.at <= known else stretch.made.stop
            lines.append(Line(self.positions[stretch.head], lead, stretch.made.start, hi))
            lines += [Line.quiet(self.positions[now], lead) for now in quiet]
            if reason is None:
                continue
            if reason == "discard":
                return after
            self.keep(window, part, lines, reason)
            part, lines = part + 1, []
            in_doubt = stretch.made.start < window.start and stretch.news.at > known
            if reason != "gap" and not (reason == "max_iterations" and in_doubt):
                self.captured(window)
                return after
            if stretch.misses(window):
                budget = self.cap
                self.vain.append((lead, window))
            elif reason == "max_iterations" or stretch.completes(window):
                self.captured(window)
                return stretch.news.at
        if budget < self.cap:  # ended in a pause: what there is of the window is all there will be
            self.captured(window)
        return over

    def _closes(
        self, stretch: IterationSpan, window: TokenWindow, waits: list[int], budget: int, after: int, over: int
    ) -> tuple[str | None, int]:
        """Whether and why the capture ends with this stretch, and up to which event it is told of."""
        quiet = after - stretch.head - 1
        if len(stretch.made) == 1 and stretch.surely_completes(window):
            return "window", after
        if budget == 0 and (quiet or len(stretch.made) == 1):
            return "max_iterations", after - 1
        if budget and len(waits) > PATIENCE:
            return "gap", after
        if after == self.end:
            return self.reason, after
        told = stretch.news.at == after
        if told and stretch.misses(window):
            return "discard", after
        if stretch.surely_completes(window) or (told and stretch.completes(window)):
            return "window", after
        if after == over:
            return "request_end", after
        if budget == 0:
            return "max_iterations", after
        return None, self.end


class CrowdStory(Story):
    """`track: any` and `track: all`."""

    def __init__(self, events: Events, reason: str, setting: Setting) -> None:
        super().__init__(events, reason, setting)
        self.everyone = setting.track == "all"

    def tell(self) -> None:
        self._see()
        at, barred = 0, set[TokenWindow]()
        while at < self.end and self.left:
            barred = {window for window in barred if self._touched(window, at)}
            window = next((w for w in self.left if w not in barred and self._touched(w, at)), None)
            if window is None:
                at += 1
                continue
            at, capped = self._capture(window, at)
            if capped:
                barred.add(window)

    def _see(self) -> None:
        running: set[str] = set()
        for event in self.events:
            counts = [count for request, count in event.ended.items() if count is not None and request in running]
            batch = event.batch if isinstance(event, Step) else {}
            running |= batch.keys()
            seen = [made.start if made else made.start - 1 for made in batch.values()]
            self.furthest = max([self.furthest, *seen, *(count - 1 for count in counts)])

    def _touched(self, window: TokenWindow, at: int) -> dict[str, range]:
        """The requests that may make tokens of the window at `at`, by the rule of `any` or `all`."""
        event = self.events[at]
        decoding = {request: made for request, made in event.batch.items() if made} if isinstance(event, Step) else {}
        touching = {request: made for request, made in decoding.items() if window.overlaps(made.start, made.stop)}
        return touching if not self.everyone or touching == decoding else {}

    def _truths(self, touching: dict[str, range], at: int) -> dict[str, int]:
        """Tokens after the iteration at `at` as far as the next event tells, else as many as possible."""
        truths = {}
        for request, made in touching.items():
            news = self.news(request, at)
            truths[request] = made.stop if news.count is None or news.at > at + 1 else news.count
        return truths

    def _capture(self, window: TokenWindow, first: int) -> tuple[int, bool]:
        """An unbroken stretch from `first` on: where it ends, and whether at its cap."""
        holds = [hi > window.start for hi in self._truths(self._touched(window, first), first).values()]
        if not (all(holds) if self.everyone else any(holds)):
            return first + 1, False
        after = first + 1
        while after < self.end and after - first < self.cap and self._touched(window, after):
            after += 1
        last = self._touched(window, after - 1)
        capped = after - first == self.cap and (after < self.end or all(len(made) == 1 for made in last.values()))
        if capped:
            reason = "max_iterations"
        elif after == self.end:
            reason = self.reason
        else:
            reason = self._left_by(window, last, after)
        self.keep(window, 1, [self._line(window, at) for at in range(first, after)], reason)
        self.captured(window)
        return after, capped

    def _left_by(self, window: TokenWindow, last: dict[str, range], after: int) -> str:
        """`request_end` where all who made its tokens ended before the window did."""
        for request, made in last.items():
            count = self.events[after].ended.get(request)
            reached = made.start + 1 if count is None else count
            if not self.ends(request, after) or (window.end is not None and reached >= window.end):
                return "window"
        return "request_end"

    def _line(self, window: TokenWindow, at: int) -> Line:
        touching = self._touched(window, at)
        request = next(iter(touching))
        lo, hi = min(made.start for made in touching.values()), max(self._truths(touching, at).values())
        line = Line(self.positions[at], request, lo, hi)
        return line if window.overlaps(lo, hi) else Line.quiet(line.event, request)
