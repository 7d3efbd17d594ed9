"""The gate against the reference, on rollouts that nobody would think of."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from gate_model.play import play
from gate_model.reference import expected
from gate_model.schedules import Event, Idle, Rollout, Setting, Start, Step, Stop, draw_rollout, draw_setting
from hypothesis import given, settings
from hypothesis import strategies as st

TRACKS = ("lead", "any", "all")
SEEDS = 4_000
"""Of each track: 12,000 in all."""


def check(rng: random.Random, track: str) -> Counter[str]:
    """One random rollout; returns what it was about, so that a test can tell that the odd cases came up."""
    calls = rng.random() < 0.3
    rollout = draw_rollout(rng, calls=calls)
    setting = draw_setting(rng, track)
    played, wanted = play(rollout, setting, armed=not calls), expected(rollout, setting, armed=not calls)
    assert played == wanted, f"{setting}\n{rollout}"
    seen: Counter[str] = Counter()
    for arming in played:
        seen["skipped"] += any(arming.skipped or ())
        seen["captured after a skip"] += any(arming.skipped or ()) and bool(arming.traces)
        seen["unreached"] += bool(arming.unreached)
        for trace in arming.traces:
            seen[trace.reason] += 1
            seen["later part"] += trace.part > 1
            seen["gap row"] += any(line.gap for line in trace.lines)
            seen["several tokens"] += any(line.hi - line.lo > 1 for line in trace.lines)
    return seen


@pytest.mark.one_python
@pytest.mark.parametrize("track", TRACKS)
def test_thousands_of_random_rollouts(track: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            seen += check(random.Random(f"{track} {seed}"), track)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    cases = {"window", "request_end", "stop_profile", "max_iterations", "unreached", "gap row", "several tokens"}
    cases |= {"skipped", "captured after a skip"}
    cases |= {"gap", "later part"} if track == "lead" else set()
    assert {case for case in cases if seen[case] < SEEDS // 500} == set(), f"hardly tested: {seen}"


ABSENT, CHUNK, END, END_UNCOUNTED = "absent", "chunk", "end", "end, without its count"
ACTS = st.sampled_from([ABSENT, CHUNK, END, END_UNCOUNTED]) | st.tuples(st.integers(1, 5), st.integers(1, 5))
"""What one request does in an iteration; a pair: tokens that it may make, and does make (at most as many)."""
EVENTS = st.tuples(st.integers(1, 12), st.lists(ACTS, max_size=3) | st.sampled_from(["idle", "start", "stop"]))
"""An event and how often it happens in a row; an iteration is a list of what the first, second, third request does."""


def build(script: list[tuple[int, list[str | tuple[int, int]] | str]]) -> Rollout:
    """A rollout of (times, event); a request that ended is followed by a new one in its place."""
    names = [f"{place}.0" for place in range(3)]
    counts: Counter[str] = Counter()
    started: set[str] = set()
    ended: dict[str, int | None] = {}
    rollout: Rollout = []
    calls: dict[str, Event] = {"start": Start(), "stop": Stop()}
    for event in (event for times, event in script for _ in range(times)):
        if isinstance(event, str):
            rollout.append(calls.get(event) or Idle(ended))
            if event == "idle":
                ended = {}
                names = [name + "'" for name in names]
            continue
        batch: dict[str, range] = {}
        told, ended = ended, {}
        for place, act in enumerate(event):
            name = names[place]
            if isinstance(act, tuple):
                batch[name] = range(counts[name], counts[name] + act[0])
                counts[name] += min(act)
                started.add(name)
            elif act == CHUNK:
                batch[name] = range(counts[name], counts[name])
                started.add(name)
            elif act != ABSENT and name in started:
                ended[name] = counts[name] if act == END else None
                names[place] += "'"
        rollout.append(Step(batch, told))
    return rollout


@given(
    script=st.lists(EVENTS, max_size=25),
    windows=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=3),
    endless=st.booleans(),
    track=st.sampled_from(TRACKS),
    max_iterations=st.none() | st.integers(1, 12),
    max_captures=st.none() | st.integers(1, 3),
    skip_captures=st.integers(0, 2),
    armed=st.booleans(),
)
@settings(max_examples=1500, deadline=None)
@pytest.mark.one_python
def test_rollouts_that_shrink(
    script: list[tuple[int, list[str | tuple[int, int]] | str]],
    windows: list[tuple[int, int]],
    endless: bool,
    track: str,
    max_iterations: int | None,
    max_captures: int | None,
    skip_captures: int,
    armed: bool,
) -> None:
    at, bounds = 0, list[tuple[int, int | None]]()
    for before, length in windows:
        bounds.append((at + before, at + before + length))
        at += before + length
    if endless:
        bounds[-1] = (bounds[-1][0], None)
    setting = Setting(track, tuple(bounds), max_iterations, max_captures, skip_captures)
    rollout = build(script)
    assert play(rollout, setting, armed=armed) == expected(rollout, setting, armed=armed)


def test_what_is_told_is_what_was_made() -> None:
    """The simulator keeps the interface's promises, without which the tests above would prove nothing."""
    for seed in range(300):
        rollout = draw_rollout(random.Random(seed), calls=True)
        count: Counter[str] = Counter()
        gone: set[str] = set()
        for event in rollout:
            if not isinstance(event, Step):
                continue
            for request, final in event.ended.items():
                assert final in (None, count[request])
                gone.add(request)
            for request, tokens in event.batch.items():
                assert request not in gone
                assert tokens.start == count[request]
                assert bool(tokens) <= event.made[request] <= len(tokens)
                count[request] += event.made[request]
        assert not any(isinstance(event, Start) for event in draw_rollout(random.Random(seed)))
