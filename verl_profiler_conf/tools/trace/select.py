"""The part of a trace to cut out: some of its iterations, or a span of time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from verl_profiler_conf.tools.trace.errors import TraceError
from verl_profiler_conf.tools.trace.iterations import IterationRange, Source

Window = tuple[float, float]
"""Begin and end on the host, in microseconds of the trace's own clock; the end is outside."""


@dataclass(frozen=True)
class Selection:
    """What to cut out. At most one of tokens, time and like is given. Without any, every iteration is kept.

    Attributes:
        start: first response token to keep, where the ranges name tokens; else first iteration, counted from 0.
        end: one past the last; None: to the end.
        time_us: begin and end after the first event of the trace.
        like: number of the one iteration to keep; `typical` for the one whose time on the host is the median of the
            decoding ones.
        source: which ranges are the iterations; None: the first of `iterations.PREFERENCE` that the trace has.
    """

    start: int | None = None
    end: int | None = None
    time_us: tuple[float, float] | None = None
    like: int | str | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        asked = [self.start is not None or self.end is not None, self.time_us is not None, self.like is not None]
        if sum(asked) > 1:
            raise TraceError("a slice is of tokens, of a time, or like an iteration: one of them")
        if self.start is not None and self.start < 0:
            raise TraceError(f"start is {self.start}; must be at least 0")
        if self.end is not None and self.end <= (self.start or 0):
            raise TraceError(f"end is {self.end}; must be beyond the start, {self.start or 0}")
        if self.time_us is not None and not 0 <= self.time_us[0] < self.time_us[1]:
            raise TraceError("a time has to begin at 0 or later, and to end after it begins")
        if isinstance(self.like, str) and self.like != TYPICAL:
            raise TraceError(f"--like-iteration {self.like!r}: must be the number of an iteration, or {TYPICAL}")


TYPICAL = "typical"


def windows(selection: Selection, ranges: Sequence[IterationRange], first_us: float) -> list[Window]:
    """The spans of the host's time that a selection means.

    Neighbouring iterations are one span, with what lies between them. An engine's own range ends before the tokens are
    sampled, so a span of those goes on to the begin of the next iteration.

    Args:
        selection: what was asked for.
        ranges: the iterations of the trace, in order.
        first_us: when the first event of the trace began.

    Raises:
        TraceError: it means nothing in this trace; one line, without the name of the file.
    """
    if selection.time_us is not None:
        return [(first_us + selection.time_us[0], first_us + selection.time_us[1])]
    if not ranges:
        raise TraceError(
            "no iterations in it (response_tokens[...], execute_..., step[...], ProfilerStep#): give a time"
        )
    chosen = _chosen(selection, ranges)
    found: list[Window] = []
    previous = -2
    for position in chosen:
        begin, end = ranges[position].begin_us, _end(ranges, position)
        if position == previous + 1:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
        previous = position
    return found


def _chosen(selection: Selection, ranges: Sequence[IterationRange]) -> list[int]:
    if selection.like is not None:
        return [_like(selection.like, ranges)]
    has_tokens = ranges[0].name.lo is not None
    start = selection.start or 0
    end = selection.end if selection.end is not None else 2**63
    if not has_tokens:
        chosen = list(range(len(ranges)))[start:end]
        if not chosen:
            raise TraceError(f"iterations {_label(start, selection.end)} are not in it: it has {len(ranges)}, from 0")
        return chosen
    making = [
        position
        for position, found in enumerate(ranges)
        if (found.name.lo or 0) < end and (found.name.hi or 0) > start and found.name.lo != found.name.hi
    ]
    if not making:
        tokens = [(found.name.lo or 0, found.name.hi or 0) for found in ranges]
        has = f"[{min(lo for lo, _ in tokens)}, {max(hi for _, hi in tokens)})"
        raise TraceError(f"response tokens {_label(start, selection.end)} are not in it: it has {has}")
    # Iterations that made no token of the request lie inside where their neighbours were asked for.
    return [p for p in range(making[0], making[-1] + 1) if p in set(making) or ranges[p].name.lo == ranges[p].name.hi]


def _like(like: int | str, ranges: Sequence[IterationRange]) -> int:
    if like == TYPICAL:
        decoding = [p for p, found in enumerate(ranges) if found.name.phase == "decode"] or list(range(len(ranges)))
        times = {p: ranges[p].end_us - ranges[p].begin_us for p in decoding}
        median = statistics.median_low(times.values())
        return next(p for p in decoding if times[p] == median)
    for position, found in enumerate(ranges):
        if (position if found.name.number is None else found.name.number) == like:
            return position
    first, last = (
        position if r.name.number is None else r.name.number
        for position, r in ((0, ranges[0]), (len(ranges) - 1, ranges[-1]))
    )
    raise TraceError(f"iteration {like} is not in it: it has {first} to {last}")


def _end(ranges: Sequence[IterationRange], position: int) -> float:
    found = ranges[position]
    if found.name.source in ("vllm", "sglang") and position + 1 < len(ranges):
        return ranges[position + 1].begin_us
    return found.end_us


def _label(start: int, end: int | None) -> str:
    return f"[{start}, {'end' if end is None else end})"
