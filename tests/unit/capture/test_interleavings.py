"""Several loops in one process, in any order and on several threads, against a slow reference.

The threads are real and take turns; the device profiler is a stand-in with Kineto's rules.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from strict_profiler import StrictKineto, StrictProfiler, Turns

from verl_profiler_conf.capture import arming as armings
from verl_profiler_conf.capture import live
from verl_profiler_conf.capture.form import Source
from verl_profiler_conf.capture.loop_session import LoopSession
from verl_profiler_conf.capture.open_capture import OpenCapture
from verl_profiler_conf.capture.ranges import RANGE
from verl_profiler_conf.capture.recorder import recorder
from verl_profiler_conf.core.settings import Settings

THREADS = 3


@dataclass(frozen=True)
class Plan:
    """One schedule.

    Attributes:
        windows: first token, one past the last.
        max_captures: of each window.
        skip_captures: times that each window goes by first.
        threads: of each loop.
        events: (what, loop): `begin` and `end` of an iteration, `finish`, `fail` (inside an iteration), `job end`.
    """

    windows: tuple[tuple[int, int], ...]
    max_captures: int | None
    skip_captures: int
    threads: tuple[int, ...]
    events: tuple[tuple[str, int], ...]


@dataclass
class Capture:
    loop: int
    window: tuple[int, int]
    rows: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""
    others: int = 0

    def key(self) -> tuple[Any, ...]:
        return self.loop, self.window, tuple(self.rows), self.reason, self.others


def draw(rng: random.Random) -> Plan:
    first = rng.randint(0, 4)
    windows = [(first, first + rng.randint(1, 4))]
    if rng.random() < 0.5:
        second = windows[0][1] + rng.randint(0, 3)
        windows.append((second, second + rng.randint(1, 3)))
    loops = rng.randint(1, 4)
    threads = tuple(rng.randrange(THREADS) for _ in range(loops))
    left = {loop: rng.randint(0, 12) for loop in range(loops)}
    inside: set[int] = set()
    events: list[tuple[str, int]] = []
    ends_early = rng.random() < 0.25
    while left:
        if ends_early and rng.random() < 0.05:
            events.append(("job end", -1))
            ends_early = False
        loop = rng.choice(list(left))
        for _ in range(rng.choice((1, 1, 2, 6))):  # now and then a loop goes on for a while
            if loop in inside:
                failed = rng.random() < 0.02
                events.append(("fail" if failed else "end", loop))
                inside.remove(loop)
                if failed:
                    del left[loop]
                    break
                left[loop] -= 1
            elif left[loop] <= 0 or rng.random() < 0.02:
                events.append(("finish", loop))
                del left[loop]
                break
            else:
                events.append(("begin", loop))
                inside.add(loop)
    most, skips = rng.choice((1, 1, 1, 2, None)), rng.choice((0, 0, 0, 1, 2))
    return Plan(tuple(windows), most, skips, threads, tuple(events))


class Reference:
    """What has to be captured, by the rules' own words. One request a loop, one token an iteration."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.done: list[Capture] = []
        self.counted: Counter[tuple[int, int]] = Counter()
        self.skipped: Counter[tuple[int, int]] = Counter()
        self.goes_by: dict[int, tuple[int, int]] = {}
        """Loop -> the window that it lets go by, or has."""
        self.position: Counter[int] = Counter()
        self.inside: set[int] = set()
        self.current: Capture | None = None
        self.over = False

    def captures(self) -> list[Capture]:
        for what, loop in self.plan.events:
            if what == "job end":
                self.over = True
            else:
                getattr(self, what)(loop, self.position[loop], self._mine(loop))
        return self.done

    def begin(self, loop: int, token: int, mine: Capture | None) -> None:
        if self.current is not None and mine is None:
            self.current.others += 1
        if mine is not None and self.over:
            self._close("job_end")
        elif mine is not None:
            mine.rows.append((token, token + 1))
        elif not self.over and not self._lets_go_by(loop, token) and self.current is None:
            self._open(loop, token)
        self.inside.add(loop)

    def end(self, loop: int, token: int, mine: Capture | None) -> None:
        if mine is not None and token + 1 == mine.window[1]:
            self._close("window")
        elif mine is not None and self.over:
            self._close("job_end")
        self.position[loop] += 1
        self.inside.discard(loop)

    def finish(self, loop: int, token: int, mine: Capture | None) -> None:
        if mine is not None:
            self._close("job_end" if self.over else "request_end")

    def fail(self, loop: int, token: int, mine: Capture | None) -> None:
        if mine is not None:
            mine.rows[-1] = (token, token)  # the token was never made
            is_last = token + 1 == mine.window[1]
            self._close("job_end" if self.over and not is_last else "error")
        self.inside.discard(loop)

    def _mine(self, loop: int) -> Capture | None:
        return self.current if self.current is not None and self.current.loop == loop else None

    def _lets_go_by(self, loop: int, token: int) -> bool:
        """Whether the loop is in a window that goes by, whoever else is recorded."""
        for window in self._wanted(token):
            if self.skipped[window] < self.plan.skip_captures:
                self.skipped[window] += 1
                self.goes_by[loop] = window
        return loop in self.goes_by and token < self.goes_by[loop][1]

    def _wanted(self, token: int) -> list[tuple[int, int]]:
        """The window that begins with the token, if it is still wanted."""
        limit = self.plan.max_captures
        at_token = [window for window in self.plan.windows if window[0] == token]
        return [window for window in at_token if limit is None or self.counted[window] < limit]

    def _open(self, loop: int, token: int) -> None:
        for window in self._wanted(token):
            self.current = Capture(loop, window, [(token, token + 1)], others=len(self.inside - {loop}))

    def _close(self, reason: str) -> None:
        assert self.current is not None
        self.current.reason = reason
        self.counted[self.current.window] += 1
        self.done.append(self.current)
        self.current = None


class Memory:
    """Stands for the files: keeps captures instead of writing them."""

    device = "cpu"

    def __init__(self) -> None:
        self.captures: list[tuple[OpenCapture, str]] = []

    def write(self, capture: OpenCapture, recording: Any, reason: str, *, furthest: int, error: Any = None) -> None:
        assert error is None, error
        recording.write(Path("capture"), capture.renames)
        self.captures.append((capture, reason))

    def note_missed(self, *_: Any) -> None: ...

    def report_opening(self, *_: Any, **__: Any) -> None: ...

    def report_discarded(self, *_: Any, **__: Any) -> None: ...

    def report_unreached(self, *_: Any, **__: Any) -> None: ...


class Run:
    """Plays a plan."""

    def __init__(self, plan: Plan, turns: Turns) -> None:
        self.plan = plan
        self.turns = turns
        self.kineto = StrictKineto()
        raw = {"profile_token_windows": [list(w) for w in plan.windows], "max_captures": plan.max_captures}
        raw |= {"skip_captures": plan.skip_captures}
        settings = Settings.from_mapping({**raw, "save_path": "nowhere", "device": "cpu"})
        self.arming = armings.shared_arming(settings, Source("toy", "1", 0))
        self.arming._profiler = StrictProfiler(self.kineto)
        self.memory = self.arming.outputs = self.arming.placeholders = Memory()  # type: ignore[assignment]
        self.sessions = [LoopSession(self.arming) for _ in plan.threads]
        self.position: Counter[int] = Counter()
        self.inside: set[int] = set()
        self.mixed: dict[tuple[int, int], set[int]] = {}
        """(loop, token) -> other loops whose iteration was under way on the same thread when that iteration began."""
        self.closer: threading.Thread | None = None

    def play(self) -> list[Capture]:
        for what, loop in self.plan.events:
            if what == "job end":
                self.end_job()
            else:
                self.turns.run(self.plan.threads[loop], lambda what=what, loop=loop: getattr(self, what)(loop))
        if self.closer is not None:
            self.closer.join(30)
            assert not self.closer.is_alive()
        return [
            Capture(
                int(capture.tracked[0].removeprefix("loop")),
                (capture.window.start, capture.window.end or 0),
                [(row.lo, row.hi) for row in capture.rows],
                reason,
                capture.other_iterations,
            )
            for capture, reason in self.memory.captures
        ]

    def begin(self, loop: int) -> None:
        token = self.position[loop]
        here = self.plan.threads[loop]
        self.mixed[loop, token] = {other for other in self.inside if self.plan.threads[other] == here}
        self.inside.add(loop)
        self.sessions[loop].begin({f"loop{loop}": range(token, token + 1)})
        self.kineto.operator(f"{loop}#{token}")

    def end(self, loop: int) -> None:
        self.kineto.operator(f"{loop}#{self.position[loop]}")
        self.sessions[loop].end()
        self.position[loop] += 1
        self.inside.discard(loop)

    def finish(self, loop: int) -> None:
        self.sessions[loop].finish({f"loop{loop}": self.position[loop]})

    def fail(self, loop: int) -> None:
        self.inside.discard(loop)
        self.sessions[loop].finish({f"loop{loop}": self.position[loop]}, reason="error")

    def end_job(self) -> None:
        """On a thread of its own, which waits for the thread of an open capture."""
        holders = [session for session in live.live_sessions() if session._capturer.capture is not None]
        asked = [session._capturer.request for session in holders]
        self.closer = threading.Thread(target=live.close_all)
        self.closer.start()
        while self.closer.is_alive() and not (self.arming.is_dead and all(request.is_waiting for request in asked)):
            self.closer.join(0.0005)


def check(rng: random.Random, turns: Turns) -> Counter[str]:
    """Play a random plan. Returns what it was about."""
    plan = draw(rng)
    run = Run(plan, turns)
    played, wanted = run.play(), Reference(plan).captures()
    assert [capture.key() for capture in played] == [capture.key() for capture in wanted], plan
    assert run.kineto.breaches == [], plan
    assert run.kineto.running is None, f"left on: {plan}"
    assert recorder.holder is None, plan
    for capture, recorded in zip(played, run.kineto.written, strict=True):
        own: set[str] = set()
        for name, operators in recorded.ranges:
            match = RANGE.fullmatch(name)
            assert match is not None
            token = int(match[1])
            loops = {int(operator.split("#")[0]) for operator in operators}
            assert loops <= {capture.loop} | run.mixed[capture.loop, token], f"{name} holds {operators}: {plan}"
            own.update(operator for operator in operators if int(operator.split("#")[0]) == capture.loop)
        assert own == {f"{capture.loop}#{token}" for token, _ in capture.rows}, plan
    seen: Counter[str] = Counter(capture.reason for capture in played)
    seen["others"] += sum(capture.others > 0 for capture in played)
    pairs = zip(played, run.kineto.written, strict=True)
    seen["interrupted ranges"] += sum(len(recorded.ranges) > len(capture.rows) for capture, recorded in pairs)
    seen["none"] += not played
    seen["captured after a skip"] += bool(plan.skip_captures and played)
    armings.forget_armings()
    return seen


def check_many(count: int, seeds: Mapping[str, int] | None = None) -> None:
    turns = Turns(THREADS)
    seen: Counter[str] = Counter()
    try:
        for seed in range(count):
            seen += check(random.Random(f"interleaving {seed}"), turns)
    finally:
        turns.close()
    cases = {
        "window",
        "request_end",
        "job_end",
        "error",
        "others",
        "interrupted ranges",
        "none",
        "captured after a skip",
    }
    assert {case for case in cases if seen[case] < count // 500} == set(), f"hardly tested: {seen}"


def test_a_thousand_interleavings() -> None:
    check_many(1_000)


@pytest.mark.long
def test_ten_thousand_interleavings() -> None:
    check_many(10_000)
