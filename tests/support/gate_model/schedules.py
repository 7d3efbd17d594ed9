"""Random rollouts, as a serving engine makes them, and what a gate is told of them.

Requests arrive late, have their prompt cut in chunks, wait for a place in the batch, miss iterations (pipeline
bubbles), are preempted and prefilled anew, make 1 to 5 tokens an iteration of which only the first is certain
beforehand, end early, and end with or without word of their final count.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One iteration: what a gate is told before it, and (`made`) what came of it."""

    batch: dict[str, range]
    ended: dict[str, int | None]
    made: dict[str, int] = field(default_factory=dict)
    """Request id -> tokens that it really made."""


@dataclass(frozen=True)
class Idle:
    """The engine has nothing left to run."""

    ended: dict[str, int | None]


@dataclass(frozen=True)
class Start:
    """`start_profile`."""


@dataclass(frozen=True)
class Stop:
    """`stop_profile`."""


Event = Step | Idle | Start | Stop
Rollout = list[Event]


@dataclass(frozen=True)
class Habits:
    """What the engine of one rollout is like; chances are per request and iteration."""

    requests: int
    longest: int
    """Most response tokens of a request."""
    places: int
    """Most requests in a batch."""
    speculates: int
    """Most tokens that a request makes in an iteration."""
    chunks: int
    """Most iterations that a prompt takes."""
    spread: int
    """Iterations over which requests arrive."""
    bubble: float
    preempt: float
    abort: float
    hollow: float
    """Chance of an iteration without any request."""
    counts: float
    """Chance that the end of a request is told with its final count."""
    calls: float
    """Chance of a start or stop call before an iteration."""
    rounds: int
    """Times that the engine is filled anew after it ran dry."""

    @classmethod
    def draw(cls, rng: random.Random, *, calls: bool = False) -> Habits:
        """Habits that make rollouts which are small, but odd."""
        return cls(
            requests=rng.choice((1, 1, 2, 3, 6)),
            longest=rng.choice((3, 12, 24, 24)),
            places=rng.choice((1, 2, 4, 8)),
            speculates=rng.choice((1, 1, 2, 5)),
            chunks=rng.choice((1, 1, 3)),
            spread=rng.choice((0, 0, 4, 20)),
            bubble=rng.choice((0.0, 0.0, 0.1, 0.5)),
            preempt=rng.choice((0.0, 0.0, 0.02, 0.15)),
            abort=rng.choice((0.0, 0.0, 0.01, 0.05)),
            hollow=rng.choice((0.0, 0.0, 0.05, 0.3)),
            counts=rng.choice((1.0, 1.0, 0.5, 0.0)),
            calls=rng.choice((0.01, 0.05, 0.2)) if calls else 0.0,
            rounds=rng.choice((1, 1, 2)),
        )


class _Request:
    def __init__(self, name: str, length: int, prefill: int, arrives: int) -> None:
        self.name = name
        self.length = length
        self.prefill = prefill
        """Iterations that its prompt still takes; the last of them makes the next token."""
        self.count = 0
        self.ready = arrives
        """First iteration in which it can be scheduled."""


class _Engine:
    def __init__(self, rng: random.Random, habits: Habits) -> None:
        self.rng = rng
        self.habits = habits
        self.events: Rollout = []
        self.clock = 0
        self.ended: dict[str, int | None] = {}
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []

    def run(self) -> Rollout:
        for number in range(self.habits.rounds):
            self._fill(number)
            while self.waiting or self.running:
                self._calls()
                self._iterate()
                if self.rng.random() < 0.002:  # the engine is emptied, without word on each request
                    self.waiting, self.running = [], []
            self._calls()
            if self.rng.random() < 0.5:
                self.events.append(Step({}, self._told()))
            self.events.append(Idle(self._told()))
        return self.events

    def _fill(self, number: int) -> None:
        for index in range(self.habits.requests):
            self.waiting.append(
                _Request(
                    f"{number}.{index}",
                    self.rng.randint(1, self.habits.longest),
                    self.rng.randint(1, self.habits.chunks),
                    self.clock + self.rng.randint(0, self.habits.spread),
                )
            )

    def _calls(self) -> None:
        while self.rng.random() < self.habits.calls:
            self.events.append(self.rng.choice((Start(), Start(), Stop())))

    def _told(self) -> dict[str, int | None]:
        ended, self.ended = self.ended, {}
        return ended

    def _end(self, request: _Request) -> None:
        self.running.remove(request)
        self.ended[request.name] = request.count if self.rng.random() < self.habits.counts else None

    def _iterate(self) -> None:
        self.clock += 1
        self._move()
        batch: dict[str, range] = {}
        made: dict[str, int] = {}
        ended = self._told()
        if self.rng.random() >= self.habits.hollow:
            for request in list(self.running):
                if self.rng.random() >= self.habits.bubble:
                    self._schedule(request, batch, made)
        self.events.append(Step(batch, ended, made))

    def _move(self) -> None:
        for request in list(self.running):
            if self.rng.random() < self.habits.abort:
                self._end(request)
            elif self.rng.random() < self.habits.preempt:
                self.running.remove(request)
                request.prefill = self.rng.randint(1, self.habits.chunks)
                request.ready = self.clock + self.rng.choice((1, 2, 5, 7, 8, 9, 10, 20))
                self.waiting.insert(self.rng.choice((0, len(self.waiting))), request)
        for request in list(self.waiting):
            if request.ready <= self.clock and len(self.running) < self.habits.places:
                self.waiting.remove(request)
                self.running.append(request)

    def _schedule(self, request: _Request, batch: dict[str, range], made: dict[str, int]) -> None:
        first = request.count
        if request.prefill > 1:
            request.prefill -= 1
            batch[request.name], made[request.name] = range(first, first), 0
            return
        request.prefill = 0
        bound = self.rng.randint(1, self.habits.speculates)
        tokens = min(self.rng.randint(1, bound), request.length - first)
        batch[request.name], made[request.name] = range(first, first + bound), tokens
        request.count += tokens
        if request.count == request.length:
            self._end(request)


def draw_rollout(rng: random.Random, *, calls: bool = False) -> Rollout:
    """One rollout. With `calls`, start and stop calls are strewn in."""
    return _Engine(rng, Habits.draw(rng, calls=calls)).run()


@dataclass(frozen=True)
class Setting:
    """What the gate is asked for."""

    track: str
    windows: tuple[tuple[int, int | None], ...]
    max_iterations: int | None
    max_captures: int | None
    skip_captures: int = 0


def draw_setting(rng: random.Random, track: str) -> Setting:
    """One to three windows, close together or apart, some of them never reached, the last one perhaps without end."""
    windows: list[tuple[int, int | None]] = []
    at = rng.choice((0, 0, 1, 3, 8))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        length = rng.choice((1, 2, 5, 10))
        windows.append((at, at + length))
        at += length + rng.choice((0, 0, 1, 4))
    if rng.random() < 0.15:
        windows[-1] = (windows[-1][0], None)
    limits = rng.choice((None, None, 1, 2, 3, 7, 12)), rng.choice((1, 1, 2, 3, None)), rng.choice((0, 0, 0, 0, 1, 2))
    return Setting(track, tuple(windows), *limits)
