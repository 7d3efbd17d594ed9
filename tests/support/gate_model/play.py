"""Plays a rollout to a gate the way a session does, and writes down what a session would have left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from verl_profiler_conf.core.gate import Gate, Opening, RecordedIteration, Verdict, make_gate
from verl_profiler_conf.core.window import TokenWindow

from .schedules import Event, Setting, Start, Step, Stop


@dataclass(frozen=True)
class Line:
    """One row of a manifest. Where the tracked request made no token, only the fact counts."""

    event: int
    """Position of the iteration among the rollout's events."""
    request: str
    lo: int
    hi: int
    gap: bool = False

    @classmethod
    def quiet(cls, event: int, request: str) -> Line:
        return cls(event, request, 0, 0, gap=True)


@dataclass(frozen=True)
class Trace:
    """One capture, as its manifest tells it."""

    window: TokenWindow
    part: int
    lines: tuple[Line, ...]
    reason: str


@dataclass(frozen=True)
class Arming:
    """What came of one arming."""

    traces: tuple[Trace, ...]
    unreached: tuple[TokenWindow, ...]
    skipped: tuple[int, ...] | None
    """How many times each window went by, as `skip_captures` asks. None where the next arming cut it off."""
    furthest: int | None
    """None where nothing was left to wait for, or windows may have gone by: then nobody asks."""


@dataclass
class _Open:
    opening: Opening
    lines: list[Line] = field(default_factory=list)


class Player:
    """Follows verdicts, and insists that they make sense."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.traces: list[Trace] = []
        self.open: _Open | None = None

    def follow(self, verdict: Verdict, event: int) -> None:
        if verdict.settled is not None:
            self._settle(verdict.settled)
        if verdict.discard:
            assert self.open is not None, "nothing to discard"
            assert verdict.close is None, "discarded and closed at once"
            self.open = None
        if verdict.close is not None:
            self._close(verdict.close)
        if verdict.open is not None:
            assert self.open is None, "opened twice"
            assert verdict.iteration is not None, "opened without an iteration to capture"
            self.open = _Open(verdict.open)
        if verdict.iteration is not None:
            self._row(verdict.iteration, event)
        if verdict.close_after is not None:
            assert verdict.iteration is not None, "closes after an iteration that is not captured"
            self._close(verdict.close_after)
        assert self.gate.is_capturing == (self.open is not None)

    def _row(self, row: RecordedIteration, event: int) -> None:
        assert self.open is not None, "a row without a capture"
        if row.gap:
            assert row.lo == row.hi
            self.open.lines.append(Line.quiet(event, row.request))
        else:
            self.open.lines.append(Line(event, row.request, row.lo, row.hi))

    def _settle(self, hi: int) -> None:
        assert self.open is not None, "settled without a capture"
        lines = self.open.lines
        last = max(index for index, line in enumerate(lines) if not line.gap)
        line = replace(lines[last], hi=hi)
        lines[last] = line if self.open.opening.window.overlaps(line.lo, hi) else replace(line, gap=True)

    def _close(self, reason: str) -> None:
        assert self.open is not None, "nothing to close"
        lines = tuple(Line.quiet(line.event, line.request) if line.gap else line for line in self.open.lines)
        self.traces.append(Trace(self.open.opening.window, self.open.opening.part, lines, reason))
        self.open = None


def windows_of(setting: Setting) -> tuple[TokenWindow, ...]:
    return tuple(TokenWindow(start, end) for start, end in setting.windows)


def play(rollout: Sequence[Event], setting: Setting, *, armed: bool = True) -> list[Arming]:
    """One entry per arming. Without `armed`, the rollout's own start calls arm."""
    gate = make_gate(
        windows_of(setting),
        track=setting.track,
        max_iterations=setting.max_iterations,
        max_captures=setting.max_captures,
        skip_captures=setting.skip_captures,
        armed=armed,
    )
    armings: list[Arming] = []
    player = Player(gate)
    under_way, skips = armed, setting.skip_captures > 0
    for index, event in enumerate(rollout):
        if isinstance(event, Start):
            if gate.is_capturing:
                gate.arm()
                continue
            if under_way:
                armings.append(_end(player, "stop_profile", skips=skips, disarm=False))
            gate.arm()
            player.traces, under_way = [], True
        elif isinstance(event, Stop):
            if under_way:
                armings.append(_end(player, "stop_profile", skips=skips))
                player.traces, under_way = [], False
            else:
                player.follow(gate.disarm(), index)
        elif isinstance(event, Step):
            player.follow(gate.step(event.batch, event.ended), index)
        else:
            player.follow(gate.idle(event.ended), index)
    if under_way:
        armings.append(_end(player, "job_end", skips=skips))
    return armings


def _end(player: Player, reason: str, *, skips: bool, disarm: bool = True) -> Arming:
    unreached = player.gate.unreached
    furthest = player.gate.furthest if unreached and not skips else None
    if disarm:
        player.follow(player.gate.disarm(reason), -1)  # type: ignore[arg-type]
        assert player.gate.unreached == unreached, "an end takes nothing back"
    skipped = tuple(player.gate.skipped(window) for window in player.gate.windows) if disarm else None
    return Arming(tuple(player.traces), unreached, skipped, furthest)


def traces(rollout: Sequence[Event], *windows: tuple[int, int | None], **setting: object) -> Sequence[Trace]:
    """The captures of a rollout that is armed from the start."""
    asked = {"track": "lead", "max_iterations": None, "max_captures": 1, "skip_captures": 0, **setting}
    return play(rollout, Setting(windows=windows, **asked))[0].traces  # type: ignore[arg-type]
