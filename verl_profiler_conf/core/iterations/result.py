"""What `plan` answers: counters, how well they hold the window, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Counters = Mapping[str, "int | None"]


@dataclass(frozen=True)
class Fit:
    """How a capture by these counters lies against the window.

    Attributes:
        kind: `exact`; `shifted`, by at least `earliest` and at most `latest` tokens (negative: too early); `cannot`
            when no counter of that engine holds the window.
    """

    kind: Literal["exact", "shifted", "cannot"]
    earliest: int = 0
    latest: int = 0

    @property
    def exact(self) -> bool:
        return self.kind == "exact"

    def __str__(self) -> str:
        if self.kind == "exact":
            return "exact"
        if self.kind == "cannot":
            return "not possible"
        if self.earliest == self.latest:
            return f"shifted by {self.earliest:+d}"
        return f"shifted by {self.earliest:+d} to {self.latest:+d}"


EXACT = Fit("exact")
CANNOT = Fit("cannot")


@dataclass(frozen=True)
class CounterPlan:
    """The window, in the counters of one engine.

    Attributes:
        engine: `vllm`, `sglang` or `tensorrt_llm`.
        version: the version whose way of counting was used.
        values: counter -> value in iterations; None: leave it unset. Where `fit` is `cannot` these are the nearest
            values (as if every iteration made one token), or all None where the engine has no such counter.
        fit: how a capture by these values lies against the window.
        reason: one sentence that explains the fit or the values.
        assumes: what was not known and is taken for granted. The fit holds if it is so.
        prefill_iteration: 0-based iteration, since profiling was started, that makes response token 0.
    """

    engine: str
    version: str
    values: Counters
    fit: Fit
    reason: str
    assumes: tuple[str, ...] = ()
    prefill_iteration: int = 0

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.values.items())
        condition = f", if {' and '.join(self.assumes)}" if self.assumes else ""
        return f"{self.engine} {self.version}: {values}: {self.fit}{condition}: {self.reason}"


@dataclass(frozen=True)
class IterationSpan:
    """What to capture, in iterations since profiling was started: `[first, stop)`, open when `stop` is None.

    `from_start`: the window begins with token 0, so that iterations before `first` hold no response token.
    """

    first: int
    stop: int | None
    from_start: bool

    @property
    def length(self) -> int | None:
        return None if self.stop is None else self.stop - self.first

    @property
    def is_whole(self) -> bool:
        """Whether everything from start_profile to stop_profile is asked for: no counter needed."""
        return self.from_start and self.stop is None


@dataclass(frozen=True)
class EngineFit:
    """An engine's part of a plan.

    Attributes:
        values: counter -> value in iterations.
        reason: one sentence that explains them.
        assumes: what was not known and is taken for granted.
        obstacle: why its counters cannot hold the span; None: they can.
        slop: iterations by which the engine's boundary may be off, at the earliest and at the latest.
    """

    values: Counters
    reason: str
    assumes: tuple[str, ...] = ()
    obstacle: str | None = None
    slop: tuple[int, int] = (0, 0)
