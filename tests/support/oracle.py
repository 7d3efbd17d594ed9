"""What a trace has to hold, worked out without the package: from a spy's log of each iteration, and the trace alone.

A spy, installed beneath the package's hook, logs for each iteration when it began and ended (Unix time), which response
tokens it really made (from what the engine handed out afterwards), and puts two markers into whatever trace is being
recorded, one at each end. `check` holds a trace against that log.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = re.compile(r"spy (begin|end) (\d+)")
RANGE = re.compile(r"response_tokens\[(\d+):(\d+)\) iter=(\d+) reqs=(\d+)")
CLOCK_SLACK_NS = 1_000_000
"""The profiler converts its time stamp counter to Unix time; the two clocks differ by some microseconds."""
LONGEST_GAP = 8


@dataclass
class Iteration:
    """One forward over a batch."""

    number: int
    begin_ns: int = 0
    end_ns: int = 0
    made: dict[str, range] = field(default_factory=dict)
    """Request id -> response tokens that it got from this iteration, empty ranges for prompt chunks, in scheduling
    order."""
    ended: frozenset[str] = frozenset()
    """Requests that were known, before it, to have ended; where a log does not say, the iteration after their last."""


@dataclass
class Run:
    """What a driver brings back from one workload.

    Attributes:
        rounds: the log of each round; iterations are numbered through.
        folder: where the captures lie.
        responses: length of each request's response, over all rounds.
    """

    rounds: list[list[Iteration]]
    folder: Path
    responses: list[int]

    @property
    def log(self) -> list[Iteration]:
        return [iteration for log in self.rounds for iteration in log]


@dataclass
class Expected:
    """One capture that has to exist."""

    window: tuple[int, int | None]
    request: str
    iterations: list[int]
    """Numbers, gaps included."""
    gaps: list[int] = field(default_factory=list)


def number_tokens(batches: Iterable[dict[str, int]]) -> list[dict[str, range]]:
    """Per iteration, request id -> count of tokens made, into index ranges."""
    made: dict[str, int] = {}
    numbered = []
    for batch in batches:
        row = {}
        for request, count in batch.items():
            first = made.get(request, 0)
            made[request] = first + count
            row[request] = range(first, first + count)
        numbered.append(row)
    return numbered


def overlaps(made: range, window: tuple[int, int | None]) -> bool:
    start, end = window
    return len(made) > 0 and made.stop > start and (end is None or made.start < end)


def expect_lead(
    log: Sequence[Iteration], windows: Sequence[tuple[int, int | None]], skip_captures: int = 0
) -> list[Expected]:
    """The captures of `track: lead`, by the rule's own words: the first request scheduled; when it has ended before a
    window, or has let it go by, the running one that is furthest along and has not passed the window's start."""
    captures = []
    last_seen = {request: at for at, it in enumerate(log) for request in it.made}
    skips = dict.fromkeys(windows, skip_captures)
    lead: str | None = next((request for it in log for request in it.made), None)
    todo = list(windows)
    position = 0
    while todo and lead is not None:
        window = todo[0]
        rows = [it for it in log[position:] if overlaps(it.made.get(lead, range(0)), window)]
        if rows and not skips[window]:
            todo.pop(0)
            captures += _parts(window, lead, [it.number for it in rows])
            continue
        if rows:
            skips[window] -= 1
            position = log.index(rows[-1]) + 1
        else:  # it ended before the window: who takes over, in the first iteration that knows of it
            position = next((at for at, it in enumerate(log) if lead in it.ended), last_seen[lead] + 1)
        lead = None
        while position < len(log) and lead is None:
            lead = _furthest(log, position, window[0])
            position += lead is None
    return captures


def _furthest(log: Sequence[Iteration], position: int, start: int) -> str | None:
    standing = {request: made.start for request, made in log[position].made.items()}
    fit = {request: at for request, at in standing.items() if at <= start}
    return max(fit, key=lambda request: fit[request]) if fit else None


def _parts(window: tuple[int, int | None], lead: str, numbers: list[int]) -> list[Expected]:
    """A capture stays open over up to 8 iterations without a token of the lead; what follows is the next part."""
    parts = [Expected(window, lead, [numbers[0]])]
    for before, number in itertools.pairwise(numbers):
        gaps = list(range(before + 1, number))
        parts[-1].iterations += gaps[:LONGEST_GAP]
        parts[-1].gaps += gaps[:LONGEST_GAP]
        if len(gaps) > LONGEST_GAP:
            parts.append(Expected(window, lead, []))
        parts[-1].iterations.append(number)
    return parts


def expect_crowd(
    log: Sequence[Iteration], window: tuple[int, int | None], *, everyone: bool, skip_captures: int = 0
) -> list[Expected]:
    """The first unbroken stretch of iterations in which any request (or every decoding one) makes a token of it, after
    those that go by."""
    stretches: list[list[int]] = [[]]
    for it in log:
        decoding = [made for made in it.made.values() if made]
        hits = [overlaps(made, window) for made in decoding]
        if decoding and (all(hits) if everyone else any(hits)):
            stretches[-1].append(it.number)
        elif stretches[-1]:
            stretches.append([])
    return [Expected(window, "", stretch) for stretch in stretches[skip_captures : skip_captures + 1] if stretch]


@dataclass
class Trace:
    """A trace file, read from its events alone."""

    path: Path
    operators: list[tuple[int, int, str]]
    """(begin, end, name), Unix nanoseconds."""
    markers: dict[str, list[int]]
    """`begin` and `end` -> numbers of the iterations whose marker is in it, in order of time."""
    ranges: list[tuple[int, int, int, int]]
    """(lo, hi, iteration, requests) of the package's own ranges."""


def read_trace(path: Path) -> Trace:
    with gzip.open(path, "rt") as file:
        raw: dict[str, Any] = json.load(file)
    base = int(raw.get("baseTimeNanoseconds", 0))
    spans = []
    for event in raw["traceEvents"]:
        if event.get("ph") == "X":
            begin = base + round(float(event["ts"]) * 1000)
            spans.append((begin, begin + round(float(event.get("dur", 0)) * 1000), event))
    spans.sort(key=lambda span: span[0])
    operators = [(begin, end, event["name"]) for begin, end, event in spans if event.get("cat") == "cpu_op"]
    markers: dict[str, list[int]] = {"begin": [], "end": []}
    ranges = []
    for _, _, event in spans:
        if event.get("cat") == "gpu_user_annotation":
            continue
        if mark := MARK.fullmatch(event["name"]):
            markers[mark[1]].append(int(mark[2]))
        if found := RANGE.fullmatch(event["name"]):
            lo, hi, iteration, requests = (int(group) for group in found.groups())
            ranges.append((lo, hi, iteration, requests))
    return Trace(path, operators, markers, ranges)


def check(trace: Trace, expected: Expected, log: Sequence[Iteration]) -> None:
    """Each captured iteration's operators are in the trace, whole, and no other iteration's are."""
    numbers = expected.iterations
    assert trace.markers["begin"] == numbers, "iterations that begin in the trace"
    assert trace.markers["end"] == numbers, "iterations that end in the trace"
    found = dict.fromkeys(numbers, 0)
    by_number = {it.number: it for it in log}
    for begin, end, name in trace.operators:
        for it in log:
            inside = it.begin_ns + CLOCK_SLACK_NS < begin and end < it.end_ns - CLOCK_SLACK_NS
            if inside:
                assert it.number in found, f"{name} belongs to iteration {it.number}, which is not of the window"
        for number in numbers:
            it = by_number[number]
            if it.begin_ns - CLOCK_SLACK_NS <= begin and end <= it.end_ns + CLOCK_SLACK_NS:
                found[number] += 1
    assert min(found.values()) > 10, f"operators per captured iteration: {found}"
    assert len(trace.ranges) == len(numbers), "one named range per captured iteration"
    if not expected.request:
        return
    for (lo, hi, _, requests), number in zip(trace.ranges, numbers, strict=True):
        assert requests == len(by_number[number].made)
        made = by_number[number].made.get(expected.request, range(0))
        if number not in expected.gaps:
            assert (lo, hi) == (made.start, made.stop), f"name of iteration {number}"
